#!/bin/sh
# Delete finished acceptance tests:  cleanup-k8s-tests.sh [NAMESPACE] [HOURS]      (default, and older than 24 hours)
# Only PyTorchJobs with the label app=gpu-acceptance-test, and only finished ones.
set -eu
namespace=${1:-default}
hours=${2:-24}
case $hours in '' | *[!0-9]*) echo "usage: $0 [NAMESPACE] [HOURS]" >&2 && exit 2 ;; esac
# Both times as YYYYMMDDHHMMSS, which sort as text: reading a time back is an option of GNU's date alone. The seconds of
# the limit come from awk, whose arithmetic is the same everywhere.
limit=$(date -u +%s | awk -v hours="$hours" '{
    left = $1 - hours * 3600; days = int(left / 86400); left -= days * 86400
    days += 719468; era = int(days / 146097); doe = days - era * 146097
    yoe = int((doe - int(doe / 1460) + int(doe / 36524) - int(doe / 146096)) / 365)
    doy = doe - (365 * yoe + int(yoe / 4) - int(yoe / 100)); mp = int((5 * doy + 2) / 153)
    month = mp < 10 ? mp + 3 : mp - 9; year = yoe + era * 400 + (month <= 2)
    printf "%04d%02d%02d%02d%02d%02d", year, month, doy - int((153 * mp + 2) / 5) + 1, left / 3600, left % 3600 / 60, left % 60
}')
# Not in the pipe: its status there would be lost, and a cluster that does not answer would look clean.
found=$(kubectl get pytorchjobs --namespace "$namespace" --selector app=gpu-acceptance-test \
    --output jsonpath='{range .items[*]}{.metadata.name} {.status.completionTime}{"\n"}{end}')
echo "$found" | while read -r name finished; do
    ended=$(echo "$finished" | tr -d 'TZ:-')
    # Anything but a whole time of UTC is kept.
    case $ended in *[!0-9]* | '') continue ;; esac
    [ ${#ended} -eq 14 ] && [ "$ended" -le "$limit" ] || continue
    kubectl delete pytorchjob --namespace "$namespace" "$name"
done
