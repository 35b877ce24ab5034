{{/* Variables of the table [openid], where there is an issuer; what is missing is said before a pod says it. */}}
{{- define "archipel.openid" -}}
{{- with .Values.openid }}
{{- if .issuer }}
{{- if not .clientId }}
{{- fail "openid: set clientId, the name under which the provider knows the server" }}
{{- end }}
{{- if not (or .admins .operators .analysts .auditors) }}
{{- fail "openid: name a value of the claim in admins, operators, analysts or auditors, or nobody can log in" }}
{{- end }}
{{- if not $.Values.secrets.openid }}
{{- fail "openid: set secrets.openid, a secret whose key `secret` is the server's password at the provider" }}
{{- end }}
- name: ARCHIPEL_SERVER_OPENID_ISSUER
  value: {{ .issuer | quote }}
- name: ARCHIPEL_SERVER_OPENID_CLIENT_ID
  value: {{ .clientId | quote }}
- name: ARCHIPEL_SERVER_OPENID_ADDRESS
  value: {{ include "archipel.openidAddress" $ | quote }}
- name: ARCHIPEL_SERVER_OPENID_SECRET_FILE
  value: /openid/secret
{{- with .caKey }}
- name: ARCHIPEL_SERVER_OPENID_CA_FILE
  value: {{ printf "/openid/%s" . | quote }}
{{- end }}
- name: ARCHIPEL_SERVER_OPENID_CLAIM
  value: {{ .claim | quote }}
- name: ARCHIPEL_SERVER_OPENID_POPULATIONS_CLAIM
  value: {{ .populationsClaim | quote }}
{{- /* In JSON: groups of a directory have commas in their names. */}}
{{- range $name := list "scopes" "admins" "operators" "analysts" "auditors" }}
- name: ARCHIPEL_SERVER_OPENID_{{ $name | upper }}
  value: {{ index $.Values.openid $name | toJson | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "archipel.openidAddress" -}}
{{- if .Values.openid.address -}}
{{- .Values.openid.address -}}
{{- else if .Values.ingress.enabled -}}
https://{{ .Values.ingress.host }}
{{- else -}}
{{- fail "openid: set address, the URL under which browsers reach the server, such as https://federation.example" -}}
{{- end -}}
{{- end }}

{{/* The provider's port, for the network policy. */}}
{{- define "archipel.openidPort" -}}
{{- regexFind ":[0-9]+$" (urlParse .Values.openid.issuer).host | trimPrefix ":" | default "443" -}}
{{- end }}
