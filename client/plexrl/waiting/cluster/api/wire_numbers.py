"""Field numbers of the protobuf form of Kubernetes objects, by model. Data alone: `protobuf` reads it.

These are the numbers in the `protobuf` tags of the Go types of Kubernetes 1.37; they never change, new ones are added.
`*name=3` is a field whose absence means something else than its zero (a pointer in Go); `2(a=1 b=2)` is a message with
number 2 whose fields JSON shows one level up.
"""

from collections.abc import Mapping
from types import MappingProxyType

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "apps_v1.Deployment": "metadata=1 spec=2 status=3",
        "apps_v1.DeploymentCondition": "type=1 status=2 reason=4 message=5 lastUpdateTime=6 lastTransitionTime=7",
        "apps_v1.DeploymentSpec": (
            "*replicas=1 *selector=2 template=3 strategy=4 minReadySeconds=5 *revisionHistoryLimit=6 paused=7 "
            "*progressDeadlineSeconds=9"
        ),
        "apps_v1.DeploymentStatus": (
            "observedGeneration=1 replicas=2 updatedReplicas=3 availableReplicas=4 unavailableReplicas=5 "
            "conditions=6 readyReplicas=7 *collisionCount=8 *terminatingReplicas=9"
        ),
        "apps_v1.DeploymentStrategy": "type=1 *rollingUpdate=2",
        "apps_v1.ReplicaSet": "metadata=1 spec=2 status=3",
        "apps_v1.ReplicaSetCondition": "type=1 status=2 lastTransitionTime=3 reason=4 message=5",
        "apps_v1.ReplicaSetSpec": "*replicas=1 *selector=2 template=3 minReadySeconds=4",
        "apps_v1.ReplicaSetStatus": (
            "replicas=1 fullyLabeledReplicas=2 observedGeneration=3 readyReplicas=4 availableReplicas=5 "
            "conditions=6 *terminatingReplicas=7"
        ),
        "apps_v1.RollingUpdateDeployment": "*maxUnavailable=1 *maxSurge=2",
        "autoscaling_v1.Scale": "metadata=1 spec=2 status=3",
        "autoscaling_v1.ScaleSpec": "replicas=1",
        "autoscaling_v1.ScaleStatus": "replicas=1 selector=2",
        "batch_v1.Job": "metadata=1 spec=2 status=3",
        "batch_v1.JobCondition": "type=1 status=2 lastProbeTime=3 lastTransitionTime=4 reason=5 message=6",
        "batch_v1.JobSchedulingConfiguration": (
            "*schedulingPolicy=1 *schedulingConstraints=2 *disruptionMode=3 resourceClaims=4"
        ),
        "batch_v1.JobSpec": (
            "*parallelism=1 *completions=2 *activeDeadlineSeconds=3 *selector=4 *manualSelector=5 template=6 "
            "*backoffLimit=7 *ttlSecondsAfterFinished=8 *completionMode=9 *suspend=10 *podFailurePolicy=11 "
            "*backoffLimitPerIndex=12 *maxFailedIndexes=13 *podReplacementPolicy=14 *managedBy=15 "
            "*successPolicy=16 *scheduling=17"
        ),
        "batch_v1.JobStatus": (
            "conditions=1 *startTime=2 *completionTime=3 active=4 succeeded=5 failed=6 completedIndexes=7 "
            "*uncountedTerminatedPods=8 *ready=9 *failedIndexes=10 *terminating=11"
        ),
        "batch_v1.PodFailurePolicy": "rules=1",
        "batch_v1.PodFailurePolicyOnExitCodesRequirement": "*containerName=1 operator=2 values=3",
        "batch_v1.PodFailurePolicyOnPodConditionsPattern": "type=1 status=2",
        "batch_v1.PodFailurePolicyRule": "action=1 *onExitCodes=2 onPodConditions=3",
        "batch_v1.SuccessPolicy": "rules=1",
        "batch_v1.SuccessPolicyRule": "*succeededIndexes=1 *succeededCount=2",
        "batch_v1.UncountedTerminatedPods": "succeeded=1 failed=2",
        "core_v1.AWSElasticBlockStoreVolumeSource": "volumeID=1 fsType=2 partition=3 readOnly=4",
        "core_v1.Affinity": "*nodeAffinity=1 *podAffinity=2 *podAntiAffinity=3",
        "core_v1.AppArmorProfile": "type=1 *localhostProfile=2",
        "core_v1.AttachedVolume": "name=1 devicePath=2",
        "core_v1.AzureDiskVolumeSource": "diskName=1 diskURI=2 *cachingMode=3 *fsType=4 *readOnly=5 *kind=6",
        "core_v1.AzureFilePersistentVolumeSource": "secretName=1 shareName=2 readOnly=3 *secretNamespace=4",
        "core_v1.AzureFileVolumeSource": "secretName=1 shareName=2 readOnly=3",
        "core_v1.Binding": "metadata=1 target=2",
        "core_v1.CSIPersistentVolumeSource": (
            "driver=1 volumeHandle=2 readOnly=3 fsType=4 volumeAttributes=5 *controllerPublishSecretRef=6 "
            "*nodeStageSecretRef=7 *nodePublishSecretRef=8 *controllerExpandSecretRef=9 *nodeExpandSecretRef=10"
        ),
        "core_v1.CSIVolumeSource": "driver=1 *readOnly=2 *fsType=3 volumeAttributes=4 *nodePublishSecretRef=5",
        "core_v1.Capabilities": "add=1 drop=2",
        "core_v1.CephFSPersistentVolumeSource": "monitors=1 path=2 user=3 secretFile=4 *secretRef=5 readOnly=6",
        "core_v1.CephFSVolumeSource": "monitors=1 path=2 user=3 secretFile=4 *secretRef=5 readOnly=6",
        "core_v1.CinderPersistentVolumeSource": "volumeID=1 fsType=2 readOnly=3 *secretRef=4",
        "core_v1.CinderVolumeSource": "volumeID=1 fsType=2 readOnly=3 *secretRef=4",
        "core_v1.ClusterTrustBundleProjection": "*name=1 *signerName=2 *labelSelector=3 path=4 *optional=5 *user=6",
        "core_v1.ConfigMap": "metadata=1 data=2 binaryData=3 *immutable=4",
        "core_v1.ConfigMapEnvSource": "1(name=1) *optional=2",
        "core_v1.ConfigMapKeySelector": "1(name=1) key=2 *optional=3",
        "core_v1.ConfigMapNodeConfigSource": "namespace=1 name=2 uid=3 resourceVersion=4 kubeletConfigKey=5",
        "core_v1.ConfigMapProjection": "1(name=1) items=2 *optional=4",
        "core_v1.ConfigMapVolumeSource": "1(name=1) items=2 *defaultMode=3 *optional=4 *defaultUser=5",
        "core_v1.Container": (
            "name=1 image=2 command=3 args=4 workingDir=5 ports=6 env=7 resources=8 volumeMounts=9 "
            "*livenessProbe=10 *readinessProbe=11 *lifecycle=12 terminationMessagePath=13 imagePullPolicy=14 "
            "*securityContext=15 stdin=16 stdinOnce=17 tty=18 envFrom=19 terminationMessagePolicy=20 "
            "volumeDevices=21 *startupProbe=22 resizePolicy=23 *restartPolicy=24 restartPolicyRules=25"
        ),
        "core_v1.ContainerExtendedResourceRequest": "containerName=1 resourceName=2 requestName=3",
        "core_v1.ContainerImage": "names=1 sizeBytes=2",
        "core_v1.ContainerPort": "name=1 hostPort=2 containerPort=3 protocol=4 hostIP=5",
        "core_v1.ContainerResizePolicy": "resourceName=1 restartPolicy=2",
        "core_v1.ContainerRestartRule": "action=1 *exitCodes=2",
        "core_v1.ContainerRestartRuleOnExitCodes": "operator=1 values=2",
        "core_v1.ContainerState": "*waiting=1 *running=2 *terminated=3",
        "core_v1.ContainerStateRunning": "startedAt=1",
        "core_v1.ContainerStateTerminated": (
            "exitCode=1 signal=2 reason=3 message=4 startedAt=5 finishedAt=6 containerID=7"
        ),
        "core_v1.ContainerStateWaiting": "reason=1 message=2",
        "core_v1.ContainerStatus": (
            "name=1 state=2 lastState=3 ready=4 restartCount=5 image=6 imageID=7 containerID=8 *started=9 "
            "allocatedResources=10 *resources=11 volumeMounts=12 *user=13 allocatedResourcesStatus=14 "
            "*stopSignal=15"
        ),
        "core_v1.ContainerUser": "*linux=1",
        "core_v1.DaemonEndpoint": "Port=1",
        "core_v1.DownwardAPIProjection": "items=1",
        "core_v1.DownwardAPIVolumeFile": "path=1 *fieldRef=2 *resourceFieldRef=3 *mode=4 *user=5",
        "core_v1.DownwardAPIVolumeSource": "items=1 *defaultMode=2 *defaultUser=3",
        "core_v1.EmptyDirVolumeSource": "medium=1 *sizeLimit=2 *mode=3",
        "core_v1.EnvFromSource": "prefix=1 *configMapRef=2 *secretRef=3",
        "core_v1.EnvVar": "name=1 value=2 *valueFrom=3",
        "core_v1.EnvVarSource": "*fieldRef=1 *resourceFieldRef=2 *configMapKeyRef=3 *secretKeyRef=4 *fileKeyRef=5",
        "core_v1.EphemeralContainer": (
            "1(name=1 image=2 command=3 args=4 workingDir=5 ports=6 env=7 resources=8 volumeMounts=9 "
            "*livenessProbe=10 *readinessProbe=11 *lifecycle=12 terminationMessagePath=13 imagePullPolicy=14 "
            "*securityContext=15 stdin=16 stdinOnce=17 tty=18 envFrom=19 terminationMessagePolicy=20 "
            "volumeDevices=21 *startupProbe=22 resizePolicy=23 *restartPolicy=24 restartPolicyRules=25) "
            "targetContainerName=2"
        ),
        "core_v1.EphemeralVolumeSource": "*volumeClaimTemplate=1",
        "core_v1.Event": (
            "metadata=1 involvedObject=2 reason=3 message=4 source=5 firstTimestamp=6 lastTimestamp=7 count=8 "
            "type=9 eventTime=10 *series=11 action=12 *related=13 reportingComponent=14 reportingInstance=15"
        ),
        "core_v1.EventSeries": "count=1 lastObservedTime=2",
        "core_v1.EventSource": "component=1 host=2",
        "core_v1.EvictionResponder": "name=1 *priority=2",
        "core_v1.ExecAction": "command=1",
        "core_v1.FCVolumeSource": "targetWWNs=1 *lun=2 fsType=3 readOnly=4 wwids=5",
        "core_v1.FileKeySelector": "volumeName=1 path=2 key=3 *optional=4",
        "core_v1.FlexPersistentVolumeSource": "driver=1 fsType=2 *secretRef=3 readOnly=4 options=5",
        "core_v1.FlexVolumeSource": "driver=1 fsType=2 *secretRef=3 readOnly=4 options=5",
        "core_v1.FlockerVolumeSource": "datasetName=1 datasetUUID=2",
        "core_v1.GCEPersistentDiskVolumeSource": "pdName=1 fsType=2 partition=3 readOnly=4",
        "core_v1.GRPCAction": "port=1 *service=2 *mode=3",
        "core_v1.GitRepoVolumeSource": "repository=1 revision=2 directory=3",
        "core_v1.GlusterfsPersistentVolumeSource": "endpoints=1 path=2 readOnly=3 *endpointsNamespace=4",
        "core_v1.GlusterfsVolumeSource": "endpoints=1 path=2 readOnly=3",
        "core_v1.HTTPGetAction": "path=1 port=2 host=3 scheme=4 httpHeaders=5 *protocol=6",
        "core_v1.HTTPHeader": "name=1 value=2",
        "core_v1.HostAlias": "ip=1 hostnames=2",
        "core_v1.HostIP": "ip=1",
        "core_v1.HostPathVolumeSource": "path=1 *type=2",
        "core_v1.ISCSIPersistentVolumeSource": (
            "targetPortal=1 iqn=2 lun=3 iscsiInterface=4 fsType=5 readOnly=6 portals=7 chapAuthDiscovery=8 "
            "*secretRef=10 chapAuthSession=11 *initiatorName=12"
        ),
        "core_v1.ISCSIVolumeSource": (
            "targetPortal=1 iqn=2 lun=3 iscsiInterface=4 fsType=5 readOnly=6 portals=7 chapAuthDiscovery=8 "
            "*secretRef=10 chapAuthSession=11 *initiatorName=12"
        ),
        "core_v1.ImageVolumeSource": "reference=1 pullPolicy=2",
        "core_v1.ImageVolumeStatus": "imageRef=1",
        "core_v1.KeyToPath": "key=1 path=2 *mode=3 *user=4",
        "core_v1.Lifecycle": "*postStart=1 *preStop=2 *stopSignal=3",
        "core_v1.LifecycleHandler": "*exec=1 *httpGet=2 *tcpSocket=3 *sleep=4",
        "core_v1.LinuxContainerUser": "uid=1 gid=2 supplementalGroups=3",
        "core_v1.LocalObjectReference": "name=1",
        "core_v1.LocalVolumeSource": "path=1 *fsType=2",
        "core_v1.ModifyVolumeStatus": "targetVolumeAttributesClassName=1 status=2",
        "core_v1.NFSVolumeSource": "server=1 path=2 readOnly=3",
        "core_v1.Namespace": "metadata=1 spec=2 status=3",
        "core_v1.NamespaceCondition": "type=1 status=2 lastTransitionTime=4 reason=5 message=6",
        "core_v1.NamespaceSpec": "finalizers=1",
        "core_v1.NamespaceStatus": "phase=1 conditions=2",
        "core_v1.Node": "metadata=1 spec=2 status=3",
        "core_v1.NodeAddress": "type=1 address=2",
        "core_v1.NodeAffinity": (
            "*requiredDuringSchedulingIgnoredDuringExecution=1 preferredDuringSchedulingIgnoredDuringExecution=2"
        ),
        "core_v1.NodeAllocatableMappedResources": "name=1 *quantity=2",
        "core_v1.NodeAllocatableOverheadResources": "name=1 *perPod=2 *perContainer=3",
        "core_v1.NodeAllocatableResourceClaimStatus": "resourceClaimName=1 containers=2 mapping=4 overhead=5",
        "core_v1.NodeCondition": "type=1 status=2 lastHeartbeatTime=3 lastTransitionTime=4 reason=5 message=6",
        "core_v1.NodeConfigSource": "*configMap=2",
        "core_v1.NodeConfigStatus": "*assigned=1 *active=2 *lastKnownGood=3 error=4",
        "core_v1.NodeDaemonEndpoints": "kubeletEndpoint=1",
        "core_v1.NodeFeatures": "*supplementalGroupsPolicy=1",
        "core_v1.NodePodPreemptionPolicy": "disableResizePreemption=1",
        "core_v1.NodeRuntimeHandler": "name=1 *features=2",
        "core_v1.NodeRuntimeHandlerFeatures": "*recursiveReadOnlyMounts=1 *userNamespaces=2",
        "core_v1.NodeSelector": "nodeSelectorTerms=1",
        "core_v1.NodeSelectorRequirement": "key=1 operator=2 values=3",
        "core_v1.NodeSelectorTerm": "matchExpressions=1 matchFields=2",
        "core_v1.NodeSpec": (
            "podCIDR=1 externalID=2 providerID=3 unschedulable=4 taints=5 *configSource=6 podCIDRs=7 "
            "*podPreemptionPolicy=8"
        ),
        "core_v1.NodeStatus": (
            "capacity=1 allocatable=2 phase=3 conditions=4 addresses=5 daemonEndpoints=6 nodeInfo=7 images=8 "
            "volumesInUse=9 volumesAttached=10 *config=11 runtimeHandlers=12 *features=13 declaredFeatures=14"
        ),
        "core_v1.NodeSwapStatus": "*capacity=1",
        "core_v1.NodeSystemInfo": (
            "machineID=1 systemUUID=2 bootID=3 kernelVersion=4 osImage=5 containerRuntimeVersion=6 "
            "kubeletVersion=7 kubeProxyVersion=8 operatingSystem=9 architecture=10 *swap=11 "
            "*runningInUserNamespace=12"
        ),
        "core_v1.ObjectFieldSelector": "apiVersion=1 fieldPath=2",
        "core_v1.ObjectReference": "kind=1 namespace=2 name=3 uid=4 apiVersion=5 resourceVersion=6 fieldPath=7",
        "core_v1.PersistentVolume": "metadata=1 spec=2 status=3",
        "core_v1.PersistentVolumeClaim": "metadata=1 spec=2 status=3",
        "core_v1.PersistentVolumeClaimCondition": (
            "type=1 status=2 lastProbeTime=3 lastTransitionTime=4 reason=5 message=6"
        ),
        "core_v1.PersistentVolumeClaimSpec": (
            "accessModes=1 resources=2 volumeName=3 *selector=4 *storageClassName=5 *volumeMode=6 *dataSource=7 "
            "*dataSourceRef=8 *volumeAttributesClassName=9"
        ),
        "core_v1.PersistentVolumeClaimStatus": (
            "phase=1 accessModes=2 capacity=3 conditions=4 allocatedResources=5 allocatedResourceStatuses=7 "
            "*currentVolumeAttributesClassName=8 *modifyVolumeStatus=9 *healthStatus=10"
        ),
        "core_v1.PersistentVolumeClaimTemplate": "metadata=1 spec=2",
        "core_v1.PersistentVolumeClaimVolumeSource": "claimName=1 readOnly=2",
        "core_v1.PersistentVolumeSpec": (
            "capacity=1 2(*gcePersistentDisk=1 *awsElasticBlockStore=2 *hostPath=3 *glusterfs=4 *nfs=5 *rbd=6 "
            "*iscsi=7 *cinder=8 *cephfs=9 *fc=10 *flocker=11 *flexVolume=12 *azureFile=13 *vsphereVolume=14 "
            "*quobyte=15 *azureDisk=16 *photonPersistentDisk=17 *portworxVolume=18 *scaleIO=19 *local=20 "
            "*storageos=21 *csi=22) accessModes=3 *claimRef=4 persistentVolumeReclaimPolicy=5 storageClassName=6 "
            "mountOptions=7 *volumeMode=8 *nodeAffinity=9 *volumeAttributesClassName=10"
        ),
        "core_v1.PersistentVolumeStatus": "phase=1 message=2 reason=3 *lastPhaseTransitionTime=4",
        "core_v1.PhotonPersistentDiskVolumeSource": "pdID=1 fsType=2",
        "core_v1.Pod": "metadata=1 spec=2 status=3",
        "core_v1.PodAffinity": (
            "requiredDuringSchedulingIgnoredDuringExecution=1 preferredDuringSchedulingIgnoredDuringExecution=2"
        ),
        "core_v1.PodAffinityTerm": (
            "*labelSelector=1 namespaces=2 topologyKey=3 *namespaceSelector=4 matchLabelKeys=5 mismatchLabelKeys=6"
        ),
        "core_v1.PodAntiAffinity": (
            "requiredDuringSchedulingIgnoredDuringExecution=1 preferredDuringSchedulingIgnoredDuringExecution=2"
        ),
        "core_v1.PodCertificateProjection": (
            "signerName=1 keyType=2 *maxExpirationSeconds=3 credentialBundlePath=4 keyPath=5 "
            "certificateChainPath=6 userAnnotations=7 *user=8"
        ),
        "core_v1.PodCondition": (
            "type=1 status=2 lastProbeTime=3 lastTransitionTime=4 reason=5 message=6 observedGeneration=7"
        ),
        "core_v1.PodDNSConfig": "nameservers=1 searches=2 options=3",
        "core_v1.PodDNSConfigOption": "name=1 *value=2",
        "core_v1.PodExtendedResourceClaimStatus": "requestMappings=1 resourceClaimName=2",
        "core_v1.PodIP": "ip=1",
        "core_v1.PodOS": "name=1",
        "core_v1.PodReadinessGate": "conditionType=1",
        "core_v1.PodResourceClaim": "name=1 *resourceClaimName=3 *resourceClaimTemplateName=4",
        "core_v1.PodResourceClaimStatus": "name=1 *resourceClaimName=2",
        "core_v1.PodSchedulingGate": "name=1",
        "core_v1.PodSchedulingGroup": "*podGroupName=1",
        "core_v1.PodSecurityContext": (
            "*seLinuxOptions=1 *runAsUser=2 *runAsNonRoot=3 supplementalGroups=4 *fsGroup=5 *runAsGroup=6 "
            "sysctls=7 *windowsOptions=8 *fsGroupChangePolicy=9 *seccompProfile=10 *appArmorProfile=11 "
            "*supplementalGroupsPolicy=12 *seLinuxChangePolicy=13"
        ),
        "core_v1.PodSpec": (
            "volumes=1 containers=2 restartPolicy=3 *terminationGracePeriodSeconds=4 *activeDeadlineSeconds=5 "
            "dnsPolicy=6 nodeSelector=7 serviceAccountName=8 serviceAccount=9 nodeName=10 hostNetwork=11 "
            "hostPID=12 hostIPC=13 *securityContext=14 imagePullSecrets=15 hostname=16 subdomain=17 *affinity=18 "
            "schedulerName=19 initContainers=20 *automountServiceAccountToken=21 tolerations=22 hostAliases=23 "
            "priorityClassName=24 *priority=25 *dnsConfig=26 *shareProcessNamespace=27 readinessGates=28 "
            "*runtimeClassName=29 *enableServiceLinks=30 *preemptionPolicy=31 overhead=32 "
            "topologySpreadConstraints=33 ephemeralContainers=34 *setHostnameAsFQDN=35 *os=36 *hostUsers=37 "
            "schedulingGates=38 resourceClaims=39 *resources=40 *hostnameOverride=41 *schedulingGroup=43 "
            "evictionResponders=44"
        ),
        "core_v1.PodStatus": (
            "phase=1 conditions=2 message=3 reason=4 hostIP=5 podIP=6 *startTime=7 containerStatuses=8 qosClass=9 "
            "initContainerStatuses=10 nominatedNodeName=11 podIPs=12 ephemeralContainerStatuses=13 resize=14 "
            "resourceClaimStatuses=15 hostIPs=16 observedGeneration=17 *extendedResourceClaimStatus=18 "
            "allocatedResources=19 *resources=20 nodeAllocatableResourceClaimStatuses=21 volumeHealth=22"
        ),
        "core_v1.PodTemplateSpec": "metadata=1 spec=2",
        "core_v1.PodVolumeHealth": "name=1 healthConditions=2 lastTransitionTime=3",
        "core_v1.PortworxVolumeSource": "volumeID=1 fsType=2 readOnly=3",
        "core_v1.PreferredSchedulingTerm": "weight=1 preference=2",
        "core_v1.Probe": (
            "1(*exec=1 *httpGet=2 *tcpSocket=3 *grpc=4) initialDelaySeconds=2 timeoutSeconds=3 periodSeconds=4 "
            "successThreshold=5 failureThreshold=6 *terminationGracePeriodSeconds=7"
        ),
        "core_v1.ProjectedVolumeSource": "sources=1 *defaultMode=2 *defaultUser=3",
        "core_v1.QuobyteVolumeSource": "registry=1 volume=2 readOnly=3 user=4 group=5 tenant=6",
        "core_v1.RBDPersistentVolumeSource": (
            "monitors=1 image=2 fsType=3 pool=4 user=5 keyring=6 *secretRef=7 readOnly=8"
        ),
        "core_v1.RBDVolumeSource": "monitors=1 image=2 fsType=3 pool=4 user=5 keyring=6 *secretRef=7 readOnly=8",
        "core_v1.ResourceClaim": "name=1 request=2",
        "core_v1.ResourceFieldSelector": "containerName=1 resource=2 divisor=3",
        "core_v1.ResourceHealth": "resourceID=1 health=2 *message=6",
        "core_v1.ResourceRequirements": "limits=1 requests=2 claims=3",
        "core_v1.ResourceStatus": "name=1 resources=2",
        "core_v1.SELinuxOptions": "user=1 role=2 type=3 level=4",
        "core_v1.ScaleIOPersistentVolumeSource": (
            "gateway=1 system=2 *secretRef=3 sslEnabled=4 protectionDomain=5 storagePool=6 storageMode=7 "
            "volumeName=8 fsType=9 readOnly=10"
        ),
        "core_v1.ScaleIOVolumeSource": (
            "gateway=1 system=2 *secretRef=3 sslEnabled=4 protectionDomain=5 storagePool=6 storageMode=7 "
            "volumeName=8 fsType=9 readOnly=10"
        ),
        "core_v1.SeccompProfile": "type=1 *localhostProfile=2",
        "core_v1.SecretEnvSource": "1(name=1) *optional=2",
        "core_v1.SecretKeySelector": "1(name=1) key=2 *optional=3",
        "core_v1.SecretProjection": "1(name=1) items=2 *optional=4",
        "core_v1.SecretReference": "name=1 namespace=2",
        "core_v1.SecretVolumeSource": "secretName=1 items=2 *defaultMode=3 *optional=4 *defaultUser=5",
        "core_v1.SecurityContext": (
            "*capabilities=1 *privileged=2 *seLinuxOptions=3 *runAsUser=4 *runAsNonRoot=5 "
            "*readOnlyRootFilesystem=6 *allowPrivilegeEscalation=7 *runAsGroup=8 *procMount=9 *windowsOptions=10 "
            "*seccompProfile=11 *appArmorProfile=12"
        ),
        "core_v1.ServiceAccountTokenProjection": "audience=1 *expirationSeconds=2 path=3 *user=4",
        "core_v1.SleepAction": "seconds=1",
        "core_v1.StorageOSPersistentVolumeSource": "volumeName=1 volumeNamespace=2 fsType=3 readOnly=4 *secretRef=5",
        "core_v1.StorageOSVolumeSource": "volumeName=1 volumeNamespace=2 fsType=3 readOnly=4 *secretRef=5",
        "core_v1.Sysctl": "name=1 value=2",
        "core_v1.TCPSocketAction": "port=1 host=2",
        "core_v1.Taint": "key=1 value=2 effect=3 *timeAdded=4",
        "core_v1.Toleration": "key=1 operator=2 value=3 effect=4 *tolerationSeconds=5",
        "core_v1.TopologySpreadConstraint": (
            "maxSkew=1 topologyKey=2 whenUnsatisfiable=3 *labelSelector=4 *minDomains=5 *nodeAffinityPolicy=6 "
            "*nodeTaintsPolicy=7 matchLabelKeys=8"
        ),
        "core_v1.TypedLocalObjectReference": "*apiGroup=1 kind=2 name=3",
        "core_v1.TypedObjectReference": "*apiGroup=1 kind=2 name=3 *namespace=4",
        "core_v1.Volume": (
            "name=1 2(*hostPath=1 *emptyDir=2 *gcePersistentDisk=3 *awsElasticBlockStore=4 *gitRepo=5 *secret=6 "
            "*nfs=7 *iscsi=8 *glusterfs=9 *persistentVolumeClaim=10 *rbd=11 *flexVolume=12 *cinder=13 *cephfs=14 "
            "*flocker=15 *downwardAPI=16 *fc=17 *azureFile=18 *configMap=19 *vsphereVolume=20 *quobyte=21 "
            "*azureDisk=22 *photonPersistentDisk=23 *portworxVolume=24 *scaleIO=25 *projected=26 *storageos=27 "
            "*csi=28 *ephemeral=29 *image=30)"
        ),
        "core_v1.VolumeDevice": "name=1 devicePath=2",
        "core_v1.VolumeHealthCondition": "status=1 reason=2 message=3",
        "core_v1.VolumeHealthStatus": "healthConditions=1 lastTransitionTime=2",
        "core_v1.VolumeMount": (
            "name=1 readOnly=2 mountPath=3 subPath=4 *mountPropagation=5 subPathExpr=6 *recursiveReadOnly=7 "
            "bindMountOptions=8"
        ),
        "core_v1.VolumeMountStatus": "name=1 mountPath=2 readOnly=3 *recursiveReadOnly=4 *volumeStatus=5",
        "core_v1.VolumeNodeAffinity": "*required=1",
        "core_v1.VolumeProjection": (
            "*secret=1 *downwardAPI=2 *configMap=3 *serviceAccountToken=4 *clusterTrustBundle=5 *podCertificate=6"
        ),
        "core_v1.VolumeResourceRequirements": "limits=1 requests=2",
        "core_v1.VolumeStatus": "*image=1",
        "core_v1.VsphereVirtualDiskVolumeSource": "volumePath=1 fsType=2 storagePolicyName=3 storagePolicyID=4",
        "core_v1.WeightedPodAffinityTerm": "weight=1 podAffinityTerm=2",
        "core_v1.WindowsSecurityContextOptions": (
            "*gmsaCredentialSpecName=1 *gmsaCredentialSpec=2 *runAsUserName=3 *hostProcess=4"
        ),
        "meta_v1.DeleteOptions": (
            "*gracePeriodSeconds=1 *preconditions=2 *orphanDependents=3 *propagationPolicy=4 dryRun=5 "
            "*ignoreStoreReadErrorWithClusterBreakingPotential=6"
        ),
        "meta_v1.LabelSelector": "matchLabels=1 matchExpressions=2",
        "meta_v1.LabelSelectorRequirement": "key=1 operator=2 values=3",
        "meta_v1.ManagedFieldsEntry": (
            "manager=1 operation=2 apiVersion=3 *time=4 fieldsType=6 *fieldsV1=7 subresource=8"
        ),
        "meta_v1.ObjectMeta": (
            "name=1 generateName=2 namespace=3 selfLink=4 uid=5 resourceVersion=6 generation=7 "
            "creationTimestamp=8 *deletionTimestamp=9 *deletionGracePeriodSeconds=10 labels=11 annotations=12 "
            "ownerReferences=13 finalizers=14 managedFields=17"
        ),
        "meta_v1.OwnerReference": "kind=1 name=3 uid=4 apiVersion=5 *controller=6 *blockOwnerDeletion=7",
        "meta_v1.Preconditions": "*uid=1 *resourceVersion=2",
        "policy_v1.Eviction": "metadata=1 *deleteOptions=2",
    }
)
