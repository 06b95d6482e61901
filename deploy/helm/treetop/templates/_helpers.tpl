{{- define "treetop.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "treetop.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "treetop.labels" -}}
{{ include "treetop.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "treetop.scheme" -}}
{{- if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}

{{- define "treetop.kvEvents" -}}
{{- with .Values.kvEvents -}}
{{- $config := dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" .endpoint "topic" .topic "hash_seed" .hashSeed -}}
{{- if .replayEndpoint -}}{{- $_ := set $config "replay_endpoint" .replayEndpoint -}}{{- end -}}
{{- toJson $config -}}
{{- end -}}
{{- end -}}
