{{/* The labels of a part of the cluster: "front" or "replica". */}}
{{- define "cllm.labels" -}}
app.kubernetes.io/name: cllm
app.kubernetes.io/instance: {{ .release }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* A set of pods with stable names and a volume each. */}}
{{- define "cllm.pods" -}}
{{- $labels := dict "release" .root.Release.Name "part" .part }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  labels: {{- include "cllm.labels" $labels | nindent 4 }}
spec:
  serviceName: {{ .name }}
  replicas: {{ .values.count }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "cllm.labels" $labels | nindent 6 }}
  template:
    metadata:
      labels: {{- include "cllm.labels" $labels | nindent 8 }}
    spec:
      terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 30 }}
      automountServiceAccountToken: false
      enableServiceLinks: false # its variables would look like settings
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        seccompProfile: {type: RuntimeDefault}
      {{- with .values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: cllm
          image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args: {{ .arguments | toJson }}
          env:
            - name: CLLM_SERVER_DRAIN_TIMEOUT
              value: {{ .root.Values.drainSeconds | quote }}
            - name: CLLM_CLUSTER_KEY
              valueFrom: {secretKeyRef: {name: {{ .root.Values.secretName }}, key: cluster-key}}
            {{- range .env }}
            - {{ toJson . }}
            {{- end }}
            {{- range .values.env }}
            - {{ toJson . }}
            {{- end }}
          ports:
            - {name: http, containerPort: 8000}
          readinessProbe:
            httpGet: {path: /ready, port: http}
            periodSeconds: 2
          resources: {{- toYaml .values.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            - {name: data, mountPath: /data}
            - {name: tmp, mountPath: /tmp}
      volumes:
        - name: tmp
          emptyDir: {sizeLimit: 1Gi}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .values.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ .values.storage }}}}
{{- end }}
