from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Goal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GOAL_UNSPECIFIED: _ClassVar[Goal]
    RUN: _ClassVar[Goal]
    RELEASE_CACHE: _ClassVar[Goal]
    DRAIN: _ClassVar[Goal]

class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[State]
    PENDING: _ClassVar[State]
    COMPILING: _ClassVar[State]
    LOADING: _ClassVar[State]
    STARTING: _ClassVar[State]
    STANDBY: _ClassVar[State]
    READY: _ClassVar[State]
    DRAINING: _ClassVar[State]
    GONE: _ClassVar[State]

class CacheState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_STATE_UNSPECIFIED: _ClassVar[CacheState]
    NO_CACHE: _ClassVar[CacheState]
    WAITING: _ClassVar[CacheState]
    ATTACHED: _ClassVar[CacheState]
    RELEASED: _ClassVar[CacheState]

class JobKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_KIND_UNSPECIFIED: _ClassVar[JobKind]
    COMPILE: _ClassVar[JobKind]
    EXECUTE: _ClassVar[JobKind]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_PENDING: _ClassVar[JobState]
    JOB_RUNNING: _ClassVar[JobState]
    JOB_SUCCEEDED: _ClassVar[JobState]
    JOB_FAILED: _ClassVar[JobState]
    JOB_CANCELLED: _ClassVar[JobState]
GOAL_UNSPECIFIED: Goal
RUN: Goal
RELEASE_CACHE: Goal
DRAIN: Goal
STATE_UNSPECIFIED: State
PENDING: State
COMPILING: State
LOADING: State
STARTING: State
STANDBY: State
READY: State
DRAINING: State
GONE: State
CACHE_STATE_UNSPECIFIED: CacheState
NO_CACHE: CacheState
WAITING: CacheState
ATTACHED: CacheState
RELEASED: CacheState
JOB_KIND_UNSPECIFIED: JobKind
COMPILE: JobKind
EXECUTE: JobKind
JOB_STATE_UNSPECIFIED: JobState
JOB_PENDING: JobState
JOB_RUNNING: JobState
JOB_SUCCEEDED: JobState
JOB_FAILED: JobState
JOB_CANCELLED: JobState

class Instance(_message.Message):
    __slots__ = ("name", "spec", "secrets", "boxes", "goal", "grace_seconds", "resources")
    class SecretsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: bytes
    secrets: _containers.ScalarMap[str, bytes]
    boxes: _containers.RepeatedScalarFieldContainer[str]
    goal: Goal
    grace_seconds: int
    resources: Resources
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[bytes] = ..., secrets: _Optional[_Mapping[str, bytes]] = ..., boxes: _Optional[_Iterable[str]] = ..., goal: _Optional[_Union[Goal, str]] = ..., grace_seconds: _Optional[int] = ..., resources: _Optional[_Union[Resources, _Mapping]] = ...) -> None: ...

class Resources(_message.Message):
    __slots__ = ("memory_bytes", "cpu_millis")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_MILLIS_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    cpu_millis: int
    def __init__(self, memory_bytes: _Optional[int] = ..., cpu_millis: _Optional[int] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("workload", "generation", "instances")
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    workload: str
    generation: int
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, workload: _Optional[str] = ..., generation: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: str
    def __init__(self, workload: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("workload",)
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    workload: str
    def __init__(self, workload: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("workloads", "version")
    WORKLOADS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    workloads: _containers.RepeatedCompositeFieldContainer[Workload]
    version: int
    def __init__(self, workloads: _Optional[_Iterable[_Union[Workload, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class Workload(_message.Message):
    __slots__ = ("name", "generation", "instances")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    generation: int
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    def __init__(self, name: _Optional[str] = ..., generation: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ...) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("name", "state", "reason", "sentence", "since", "goal", "url", "cache", "progress", "restarts", "host", "boxes", "running_requests", "seen_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: State
    reason: str
    sentence: str
    since: float
    goal: Goal
    url: str
    cache: CacheState
    progress: Progress
    restarts: int
    host: str
    boxes: _containers.RepeatedScalarFieldContainer[str]
    running_requests: int
    seen_at: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[State, str]] = ..., reason: _Optional[str] = ..., sentence: _Optional[str] = ..., since: _Optional[float] = ..., goal: _Optional[_Union[Goal, str]] = ..., url: _Optional[str] = ..., cache: _Optional[_Union[CacheState, str]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., restarts: _Optional[int] = ..., host: _Optional[str] = ..., boxes: _Optional[_Iterable[str]] = ..., running_requests: _Optional[int] = ..., seen_at: _Optional[float] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done", "total", "unit", "seconds")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    unit: str
    seconds: float
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("since_version",)
    SINCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    since_version: int
    def __init__(self, since_version: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "version", "workload")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Event.Kind]
        SNAPSHOT: _ClassVar[Event.Kind]
        COMPLETE: _ClassVar[Event.Kind]
        CHANGED: _ClassVar[Event.Kind]
        DELETED: _ClassVar[Event.Kind]
    KIND_UNSPECIFIED: Event.Kind
    SNAPSHOT: Event.Kind
    COMPLETE: Event.Kind
    CHANGED: Event.Kind
    DELETED: Event.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: Event.Kind
    version: int
    workload: Workload
    def __init__(self, kind: _Optional[_Union[Event.Kind, str]] = ..., version: _Optional[int] = ..., workload: _Optional[_Union[Workload, _Mapping]] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("name", "tail_lines", "follow")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAIL_LINES_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    tail_lines: int
    follow: bool
    def __init__(self, name: _Optional[str] = ..., tail_lines: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class LogChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class JobSpec(_message.Message):
    __slots__ = ("name", "kind", "spec", "boxes", "deadline_seconds", "secrets")
    class SecretsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: JobKind
    spec: bytes
    boxes: _containers.RepeatedScalarFieldContainer[str]
    deadline_seconds: int
    secrets: _containers.ScalarMap[str, bytes]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[JobKind, str]] = ..., spec: _Optional[bytes] = ..., boxes: _Optional[_Iterable[str]] = ..., deadline_seconds: _Optional[int] = ..., secrets: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("name", "kind", "state", "reason", "sentence", "submitted_at", "ended_at", "progress", "result")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: JobKind
    state: JobState
    reason: str
    sentence: str
    submitted_at: float
    ended_at: float
    progress: Progress
    result: bytes
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[JobKind, str]] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., sentence: _Optional[str] = ..., submitted_at: _Optional[float] = ..., ended_at: _Optional[float] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[bytes] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Box(_message.Message):
    __slots__ = ("name", "holder")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    holder: str
    def __init__(self, name: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class ListBoxesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBoxesResponse(_message.Message):
    __slots__ = ("boxes",)
    BOXES_FIELD_NUMBER: _ClassVar[int]
    boxes: _containers.RepeatedCompositeFieldContainer[Box]
    def __init__(self, boxes: _Optional[_Iterable[_Union[Box, _Mapping]]] = ...) -> None: ...

class LockRequest(_message.Message):
    __slots__ = ("holder", "boxes")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BOXES_FIELD_NUMBER: _ClassVar[int]
    holder: str
    boxes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holder: _Optional[str] = ..., boxes: _Optional[_Iterable[str]] = ...) -> None: ...
