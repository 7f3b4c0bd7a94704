// Renders a Helm chart where there is no Helm: Go's own templates with the functions of sprig, as Helm's engine does.
// It reads one JSON object from its input: {"chart": folder, "release": name, "namespace": name, "values": {…},
// "meta": Chart.yaml}; the templates go to its output as YAML documents. Tests alone use it, through charts.py.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type order struct {
	Chart, Release, Namespace string
	Values                    map[string]any
	Meta                      struct{ Name, Version, AppVersion string }
}

func main() {
	if err := render(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render() error {
	var asked order
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	all := template.New("").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	functions["include"] = func(name string, data any) (string, error) {
		var text bytes.Buffer
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["required"] = func(why string, value any) (any, error) {
		if value == nil || value == "" {
			return nil, errors.New(why)
		}
		return value, nil
	}
	functions["toYaml"] = func(value any) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	// Nothing is there yet, as for `helm template`.
	functions["lookup"] = func(string, string, string, string) map[string]any { return map[string]any{} }
	all.Funcs(functions)
	files, err := filepath.Glob(filepath.Join(asked.Chart, "templates", "*"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if _, err := all.New(filepath.Base(file)).Parse(string(text)); err != nil {
			return err
		}
	}
	release := map[string]any{"Name": asked.Release, "Namespace": asked.Namespace, "Service": "Helm"}
	data := map[string]any{"Values": asked.Values, "Chart": asked.Meta, "Release": release}
	for _, file := range files {
		var text bytes.Buffer
		if err := all.ExecuteTemplate(&text, filepath.Base(file), data); err != nil {
			return err
		}
		if strings.HasSuffix(file, ".yaml") {
			fmt.Printf("---\n%s\n", text.String())
		}
	}
	return nil
}
