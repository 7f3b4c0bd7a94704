{{- define "trainmaster.name" -}}
{{- printf "%s-trainmaster" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "trainmaster.selector" -}}
app.kubernetes.io/name: trainmaster
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trainmaster.labels" -}}
{{ include "trainmaster.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
