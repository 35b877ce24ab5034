{{- define "archipel.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "archipel.selector" -}}
app.kubernetes.io/name: archipel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "archipel.labels" -}}
{{ include "archipel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "archipel.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- define "archipel.claim" -}}
{{- .Values.storage.volume.existingClaim | default (printf "%s-blobs" (include "archipel.name" .)) -}}
{{- end }}

{{- define "archipel.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "archipel.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* server.toml and server.key, as files that nobody else may read, in a data folder of this pod alone. */}}
{{- define "archipel.copySettings" -}}
- name: settings
  image: {{ include "archipel.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [install, --mode=0600, -D, --target-directory=/var/lib/archipel/data, /secrets/server.toml, /secrets/server.key]
  securityContext:
    {{- include "archipel.security" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: scratch, mountPath: /var/lib/archipel}
    - {name: secrets, mountPath: /secrets, readOnly: true}
{{- end }}

{{- define "archipel.environment" -}}
- name: ARCHIPEL_SERVER_DATABASE
  valueFrom:
    secretKeyRef: {name: {{ .Values.secrets.database }}, key: url}
- name: ARCHIPEL_SERVER_BLOBS
  value: {{ .Values.storage.bucket | default "/var/lib/archipel-blobs" | quote }}
- name: ARCHIPEL_SERVER_WORKERS
  value: {{ .Values.workers | quote }}
- name: ARCHIPEL_SERVER_DRAIN_SECONDS
  value: {{ .Values.drainSeconds | quote }}
- name: ARCHIPEL_SERVER_STOP_SECONDS
  value: {{ .Values.stopSeconds | quote }}
{{- if .Values.secrets.tls }}
- name: ARCHIPEL_SERVER_TLS_CERTIFICATE
  value: /tls/tls.crt
- name: ARCHIPEL_SERVER_TLS_KEY
  value: /tls/tls.key
{{- end }}
{{- if .Values.metricsPort }}
- name: ARCHIPEL_SERVER_METRICS_HOST
  value: 0.0.0.0
- name: ARCHIPEL_SERVER_METRICS_PORT
  value: {{ .Values.metricsPort | quote }}
{{- end }}
{{- if .Values.storage.bucket }}
- name: AWS_REGION
  value: {{ .Values.storage.region | quote }}
{{- with .Values.storage.endpoint }}
- name: AWS_ENDPOINT_URL
  value: {{ . | quote }}
{{- end }}
{{- with .Values.secrets.s3 }}
{{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ . }}
  valueFrom:
    secretKeyRef: {name: {{ $.Values.secrets.s3 }}, key: {{ . }}}
{{- end }}
{{- end }}
{{- end }}
- name: ARCHIPEL_SERVER_DOCS
  value: {{ .Values.docs | quote }}
- name: ARCHIPEL_SERVER_LIVE_PAGES
  value: {{ .Values.livePages | quote }}
{{- include "archipel.openid" . }}
{{- $named := dict "blobs" "storage" "database" "secrets.database" "docs" "docs" "drain_seconds" "drainSeconds" }}
{{- $named = merge $named (dict "live_pages" "livePages" "metrics_host" "metricsPort" "metrics_port" "metricsPort") }}
{{- $named = merge $named (dict "stop_seconds" "stopSeconds" "tls_certificate" "secrets.tls" "tls_key" "secrets.tls") }}
{{- $named = merge $named (dict "workers" "workers") }}
{{- range $name, $value := .Values.settings }}
{{- with hasPrefix "openid_" $name | ternary "openid" (get $named $name) }}
{{- fail (printf "settings.%s: the chart has a value for this: %s" $name .) }}
{{- end }}
{{- /* Numbers as JSON has them: 2147483648, which Helm would make 2.147483648e+09. */}}
- name: ARCHIPEL_SERVER_{{ $name | upper }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{- define "archipel.mounts" -}}
- {name: scratch, mountPath: /var/lib/archipel}
- {name: tmp, mountPath: /tmp}
{{- if .Values.secrets.tls }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- if .Values.openid.issuer }}
- {name: openid, mountPath: /openid, readOnly: true}
{{- end }}
{{- if not .Values.storage.bucket }}
- {name: blobs, mountPath: /var/lib/archipel-blobs}
{{- end }}
{{- end }}

{{- define "archipel.volumes" -}}
- name: scratch
  emptyDir: {sizeLimit: {{ .Values.scratchSize }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: secrets
  secret: {secretName: {{ .Values.secrets.server }}, defaultMode: 288}
{{- with .Values.secrets.tls }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 288}
{{- end }}
{{- if .Values.openid.issuer }}
- name: openid
  secret: {secretName: {{ .Values.secrets.openid }}, defaultMode: 288}
{{- end }}
{{- if not .Values.storage.bucket }}
- name: blobs
  persistentVolumeClaim: {claimName: {{ include "archipel.claim" . }}}
{{- end }}
{{- end }}
