{{/* Names */}}

{{- define "tidegate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Below: `.root` is the chart's context, `.component` a process such as web, `.process` its values. And where they
are given: `.config`, which its pods are made anew for; `.serviceAccount`, and `.mountsToken`, whether all its
containers have its token. */}}

{{- define "tidegate.component" -}}
{{ include "tidegate.fullname" .root }}-{{ .component }}
{{- end -}}

{{/* Cluster Servers and network policies know processes by `app.kubernetes.io/name`. */}}
{{- define "tidegate.selectorLabels" -}}
app.kubernetes.io/name: tidegate-{{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end -}}

{{/* Without the chart's version: a new chart that changes nothing of them leaves pods as they are. */}}
{{- define "tidegate.podLabels" -}}
{{ include "tidegate.selectorLabels" . }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/part-of: tidegate
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tidegate.labels" -}}
{{ include "tidegate.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tidegate.metadata" -}}
name: {{ include "tidegate.component" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "tidegate.labels" . | nindent 2 }}
{{- end -}}

{{- define "tidegate.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A trial without an Ingress: processes reach the console by its Service, and people by a port of theirs. */}}
{{- define "tidegate.isTrial" -}}
{{- if and (eq .Values.console.mode "embedded") (not .Values.console.url) (not .Values.ingress.enabled) }}yes{{ end -}}
{{- end -}}

{{- define "tidegate.consoleService" -}}
{{ include "tidegate.fullname" . }}-web.{{ .Release.Namespace }}
{{- end -}}

{{- define "tidegate.consoleUrl" -}}
{{- if include "tidegate.isTrial" . -}}
{{- $port := int .Values.web.service.port -}}
http://{{ include "tidegate.consoleService" . }}{{ if ne $port 80 }}:{{ $port }}{{ end }}
{{- else -}}
{{ .Values.console.url | default (printf "https://%s" .Values.console.host) | trimSuffix "/" }}
{{- end -}}
{{- end -}}

{{- define "tidegate.consoleSecret" -}}
{{- if .Values.bundled.enabled -}}
{{ include "tidegate.fullname" . }}-console
{{- else -}}
{{ required "console.existingSecret is required: a Secret with DATABASE_URL, REDIS_URL and TIDEGATE_SECRET_KEY; or bundled.enabled for a trial" .Values.console.existingSecret }}
{{- end -}}
{{- end -}}

{{- define "tidegate.joinSecret" -}}
{{ .Values.join.existingSecret | default (printf "%s-join" (include "tidegate.fullname" .)) }}
{{- end -}}

{{- define "tidegate.clusterClientSecret" -}}
{{ .Values.clusterServer.clientTlsSecret | default (printf "%s-cluster-client" (include "tidegate.fullname" .)) }}
{{- end -}}

{{- define "tidegate.clusterServerSecret" -}}
{{ .Values.clusterServer.tlsSecret | default (printf "%s-cluster-server-tls" (include "tidegate.fullname" .)) }}
{{- end -}}

{{- define "tidegate.consoleName" -}}
{{ .Values.clusterServer.consoleName | default (printf "%s-console" (include "tidegate.fullname" .)) }}
{{- end -}}

{{/* Parts of a pod */}}

{{- define "tidegate.podMetadata" -}}
labels:
  {{- include "tidegate.podLabels" . | nindent 2 }}
  {{- with .process.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or .config .process.podAnnotations }}
annotations:
  {{- with .config }}
  checksum/config: {{ toJson . | sha256sum }}
  {{- end }}
  {{- with .process.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* No service links: a Service called `tidegate` would put variables into pods that look like settings. */}}
{{- define "tidegate.pod" -}}
enableServiceLinks: false
{{- if .serviceAccount }}
serviceAccountName: {{ .serviceAccount }}
{{- end }}
automountServiceAccountToken: {{ default false .mountsToken }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .process.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .process.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .process.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tidegate.topologySpread" -}}
{{- $spread := .root.Values.topologySpread -}}
{{- $keys := list -}}
{{- if $spread.hostname }}{{ $keys = append $keys "kubernetes.io/hostname" }}{{ end -}}
{{- if $spread.zone }}{{ $keys = append $keys "topology.kubernetes.io/zone" }}{{ end -}}
{{- with $keys -}}
topologySpreadConstraints:
  {{- range . }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tidegate.selectorLabels" $ | nindent 8 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "tidegate.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "tidegate.container" -}}
image: {{ include "tidegate.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{ include "tidegate.containerSecurity" . }}
{{- end -}}

{{/* The one folder that every process may write to. NOTIFY_FILE is there while it is ready (docs/production.md). */}}
{{- define "tidegate.scratchEnv" -}}
- {name: HOME, value: /tidegate/scratch}
- {name: TMPDIR, value: /tidegate/scratch}
- {name: NOTIFY_FILE, value: /tidegate/scratch/alive}
{{- end -}}

{{- define "tidegate.aliveCommand" -}}
exec: {command: [sh, -c, "find /tidegate/scratch/alive -newermt '-15 seconds' | grep -q ."]}
timeoutSeconds: 5
{{- end -}}

{{/* What a container runs, as a line of a shell. A file of a container before it, which was killed, would say that it
is ready, and then that it hangs. */}}
{{- define "tidegate.command" -}}
command: [sh, -c, {{ printf "rm -f /tidegate/scratch/alive; %s" . | quote }}]
{{- end -}}

{{/* Alive: what has said once that it is ready goes on saying that it is alive. */}}
{{- define "tidegate.aliveProbes" -}}
startupProbe:
  {{- include "tidegate.aliveCommand" . | nindent 2 }}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  {{- include "tidegate.aliveCommand" . | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 3
{{- end -}}

{{/* The text of a setting. Numbers of values are floating: a whole one of 1,000,000 or more would be 1e+06. */}}
{{- define "tidegate.setting" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* The console */}}

{{/* Whether a process talks to the Cluster Server, whose key others have no need of. */}}
{{- define "tidegate.usesCluster" -}}
{{- if and .root.Values.clusterServer.enabled (has .component (list "web" "orchestrator")) }}yes{{ end -}}
{{- end -}}

{{- define "tidegate.consoleEnv" -}}
{{ include "tidegate.scratchEnv" . }}
- {name: TIDEGATE_STATE_DIR, value: /tidegate/scratch}
- {name: TIDEGATE_TOKENIZERS_DIR, value: /tidegate/tokenizers}
{{- $hosts := prepend .root.Values.console.allowedHosts .root.Values.console.host }}
{{- if include "tidegate.isTrial" .root }}{{ $hosts = append $hosts (include "tidegate.consoleService" .root) }}{{ end }}
{{- with .root.Values.console }}
- {name: TIDEGATE_MODE, value: {{ .mode }}}
- {name: TIDEGATE_ALLOWED_HOSTS, value: {{ $hosts | join "," | quote }}}
- {name: TIDEGATE_TRUSTED_PROXIES, value: {{ .trustedProxies | quote }}}
{{- if eq .mode "embedded" }}
# The image has static files as production serves them.
- {name: TIDEGATE_STATIC_DIR, value: /tidegate/scratch/static}
{{- end }}
{{- end }}
- {name: TIDEGATE_PUBLIC_URL, value: {{ include "tidegate.consoleUrl" .root | quote }}}
{{- if include "tidegate.usesCluster" . }}
- {name: TIDEGATE_CLUSTER_URL, value: "https://{{ include "tidegate.fullname" .root }}-cluster-server:7443"}
- {name: TIDEGATE_CLUSTER_CA, value: /tidegate/cluster/ca.crt}
- {name: TIDEGATE_CLUSTER_CERTIFICATE, value: /tidegate/cluster/tls.crt}
- {name: TIDEGATE_CLUSTER_KEY, value: /tidegate/cluster/tls.key}
{{- end }}
{{- range $name, $value := .root.Values.console.settings }}
- {name: {{ $name }}, value: {{ include "tidegate.setting" $value | quote }}}
{{- end }}
{{- with .process.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The last one wins. */}}
{{- define "tidegate.consoleEnvFrom" -}}
- secretRef: {name: {{ include "tidegate.consoleSecret" .root }}}
{{- with .process.existingSecret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}

{{/* Who vouches for servers, for all pods. */}}
{{- define "tidegate.trustMount" -}}
{{- if .Values.trust.configMap -}}
- {name: trust, mountPath: /tidegate/trust, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tidegate.trustVolume" -}}
{{- with .Values.trust.configMap -}}
- name: trust
  configMap: {name: {{ . }}}
{{- end }}
{{- end -}}

{{- define "tidegate.consoleMounts" -}}
- {name: scratch, mountPath: /tidegate/scratch}
- {name: tokenizers, mountPath: /tidegate/tokenizers}
{{- with include "tidegate.trustMount" .root }}
{{ . }}
{{- end }}
{{- if include "tidegate.usesCluster" . }}
- {name: cluster, mountPath: /tidegate/cluster, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tidegate.tokenizersVolume" -}}
{{- $claim := .Values.tokenizers.existingClaim -}}
{{- if .Values.tokenizers.create }}{{ $claim = printf "%s-tokenizers" (include "tidegate.fullname" .) }}{{ end -}}
- name: tokenizers
  {{- if $claim }}
  persistentVolumeClaim: {claimName: {{ $claim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{- define "tidegate.consoleVolumes" -}}
- name: scratch
  emptyDir: {}
{{ include "tidegate.tokenizersVolume" .root }}
{{- with include "tidegate.trustVolume" .root }}
{{ . }}
{{- end }}
{{- if include "tidegate.usesCluster" . }}
- name: cluster
  secret:
    secretName: {{ include "tidegate.clusterClientSecret" .root }}
    defaultMode: 0440
    # A console without workloads needs none of it.
    optional: {{ not .root.Values.orchestrator.enabled }}
{{- end }}
{{- end -}}

{{/* What joins the console */}}

{{- define "tidegate.joinEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: {{ .prefix }}_JOIN_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "tidegate.joinSecret" .root }}, key: {{ .kind }}}}
- {name: {{ .prefix }}_CONSOLE, value: {{ include "tidegate.consoleUrl" .root | quote }}}
- {name: {{ .prefix }}_STATE_DIR, value: /tidegate/state}
{{- if eq .root.Values.console.mode "embedded" }}
- {name: {{ .prefix }}_PLAIN_CONSOLE, value: "yes"}
{{- end }}
{{- if .root.Values.join.consoleCaConfigMap }}
- {name: {{ .prefix }}_CONSOLE_CA, value: /tidegate/console/ca.crt}
{{- end }}
{{- range $name, $value := .process.settings }}
- {name: {{ $name }}, value: {{ include "tidegate.setting" $value | quote }}}
{{- end }}
{{- with .process.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tidegate.joinMounts" -}}
- {name: scratch, mountPath: /tidegate/scratch}
- {name: state, mountPath: /tidegate/state}
{{- with include "tidegate.trustMount" .root }}
{{ . }}
{{- end }}
{{- if .root.Values.join.consoleCaConfigMap }}
- {name: console, mountPath: /tidegate/console, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tidegate.joinVolumes" -}}
- name: scratch
  emptyDir: {}
{{- with include "tidegate.trustVolume" .root }}
{{ . }}
{{- end }}
{{- with .root.Values.join.consoleCaConfigMap }}
- name: console
  configMap: {name: {{ . }}}
{{- end }}
{{- end -}}

{{/* What pods of instances and wsjobs have beside what the Cluster Server gives them: podTemplate, who they run as, and
who vouches for servers. */}}
{{- define "tidegate.podTemplate" -}}
{{- $server := .Values.clusterServer -}}
{{- $template := deepCopy $server.podTemplate -}}
{{- if not (hasKey $template "securityContext") }}{{ $_ := set $template "securityContext" .Values.podSecurityContext }}{{ end -}}
{{- if and .Values.imagePullSecrets (not (hasKey $template "imagePullSecrets")) -}}
{{- $_ := set $template "imagePullSecrets" .Values.imagePullSecrets -}}
{{- end -}}
{{- if .Values.trust.configMap -}}
{{- $_ := set $template "volumes" (append ($template.volumes | default list) (include "tidegate.trustVolume" . | fromYamlArray | first)) -}}
{{- $mount := include "tidegate.trustMount" . | fromYamlArray | first -}}
{{- $containers := list -}}
{{- $hasManager := false -}}
{{- range $template.containers -}}
{{- if eq .name "manager" -}}
{{- $hasManager = true -}}
{{- $_ := set . "volumeMounts" (append (.volumeMounts | default list) $mount) -}}
{{- end -}}
{{- $containers = append $containers . -}}
{{- end -}}
{{- if not $hasManager }}{{ $containers = append $containers (dict "name" "manager" "volumeMounts" (list $mount)) }}{{ end -}}
{{- $_ := set $template "containers" $containers -}}
{{- end -}}
{{ toJson $template }}
{{- end -}}

{{/* The kubelet makes folders of a node for root: that of an agent is given to its user. */}}
{{- define "tidegate.ownContainer" -}}
{{- $user := .root.Values.podSecurityContext -}}
name: own
image: {{ include "tidegate.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [chown, "{{ $user.runAsUser | int64 }}:{{ $user.runAsGroup | int64 }}", /tidegate/state]
securityContext:
  runAsNonRoot: false
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL], add: [CHOWN]}
resources:
  requests: {cpu: 10m, memory: 64Mi}
  limits: {memory: 256Mi}
volumeMounts:
  - {name: state, mountPath: /tidegate/state}
{{- end -}}

{{/* Beside a Deployment or StatefulSet */}}

{{- define "tidegate.disruptionBudget" -}}
---
{{- if .root.Capabilities.APIVersions.Has "policy/v1" }}
apiVersion: policy/v1
{{- else }}
apiVersion: policy/v1beta1
{{- end }}
kind: PodDisruptionBudget
metadata:
  {{- include "tidegate.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "tidegate.selectorLabels" . | nindent 6 }}
{{- end -}}

{{- define "tidegate.ingress" -}}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "tidegate.metadata" . | nindent 2 }}
  {{- with .ingress.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .ingress.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- if .ingress.tlsSecret }}
  tls:
    - hosts: [{{ .host | quote }}]
      secretName: {{ .ingress.tlsSecret }}
  {{- end }}
  rules:
    - host: {{ .host | quote }}
      http:
        paths:
          - path: /
            pathType: Prefix
            backend: {service: {name: {{ include "tidegate.component" . }}, port: {name: http}}}
{{- end -}}
