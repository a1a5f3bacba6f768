"""What the server says of itself: API groups, the kinds in them, and its version.

Both forms are served: the classic lists, and the aggregated one that current clients ask for first.
"""

from plexrl.waiting.cluster.objects import Object
from plexrl.waiting.cluster.resources import GROUP_VERSIONS, RESOURCE_TYPES, VERBS, ResourceType, Subresource

AGGREGATED_MEDIA_TYPE = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
# The release whose API the schemas describe.
VERSION = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.0+plexrl",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-08-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "simulated",
}


def wants_aggregated(accept: str) -> bool:
    """Whether a client prefers the aggregated form."""
    first = accept.partition(",")[0].replace(" ", "")
    return "as=APIGroupDiscoveryList" in first and "v=v2" in first.split(";") and "application/json" in first


def core_versions() -> Object:
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def group_list() -> Object:
    groups = [group for group, _ in GROUP_VERSIONS if group]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(group) for group in groups]}


def group_of(name: str) -> Object | None:
    """One group's description, or None."""
    if name not in {group for group, _ in GROUP_VERSIONS if group}:
        return None
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name)}


def resource_list(group: str, version: str) -> Object | None:
    """The kinds of a group and version with their subresources, or None."""
    kinds = _kinds(group, version)
    if not kinds:
        return None
    resources: list[Object] = []
    for kind in kinds:
        resources.append(_resource(kind))
        resources += [_subresource(kind, part) for part in kind.subresources]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": kinds[0].api_version,
        "resources": resources,
    }


def aggregated(core: bool) -> Object:
    """Everything at once: of the core group for /api, of the others for /apis."""
    groups = [(group, version) for group, version in GROUP_VERSIONS if (group == "") is core]
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": [
            {
                "metadata": {"name": group} if group else {},
                "versions": [
                    {
                        "version": version,
                        "freshness": "Current",
                        "resources": [_aggregated_resource(kind) for kind in _kinds(group, version)],
                    }
                ],
            }
            for group, version in groups
        ],
    }


def _kinds(group: str, version: str) -> list[ResourceType]:
    return [kind for kind in RESOURCE_TYPES if (kind.group, kind.version) == (group, version)]


def _group(name: str) -> Object:
    versions = [
        {"groupVersion": f"{group}/{version}", "version": version} for group, version in GROUP_VERSIONS if group == name
    ]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def _resource(kind: ResourceType) -> Object:
    return {
        "name": kind.plural,
        "singularName": kind.singular,
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": list(VERBS),
        **({"shortNames": list(kind.short_names)} if kind.short_names else {}),
        **({"categories": list(kind.categories)} if kind.categories else {}),
    }


def _subresource(kind: ResourceType, part: Subresource) -> Object:
    return {
        "name": f"{kind.plural}/{part.name}",
        "singularName": "",
        "namespaced": kind.namespaced,
        "kind": part.kind,
        **({"group": part.group} if part.group else {}),
        **({"version": part.version} if part.version else {}),
        "verbs": list(part.verbs),
    }


def _aggregated_resource(kind: ResourceType) -> Object:
    own = {"group": kind.group, "version": kind.version}
    return {
        "resource": kind.plural,
        "responseKind": {**own, "kind": kind.kind},
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": list(VERBS),
        "shortNames": list(kind.short_names),
        "categories": list(kind.categories),
        "subresources": [
            {
                "subresource": part.name,
                "responseKind": {
                    "group": part.group or kind.group,
                    "version": part.version or kind.version,
                    "kind": part.kind,
                },
                "verbs": list(part.verbs),
            }
            for part in kind.subresources
        ],
    }
