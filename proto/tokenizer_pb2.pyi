from proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "tokens", "add_special_tokens", "hash_spec", "return_token_strings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_SPEC_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatInput
    tokens: _common_pb2.TokenIds
    add_special_tokens: bool
    hash_spec: _common_pb2.HashSpec
    return_token_strings: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., tokens: _Optional[_Union[_common_pb2.TokenIds, _Mapping]] = ..., add_special_tokens: bool = ..., hash_spec: _Optional[_Union[_common_pb2.HashSpec, _Mapping]] = ..., return_token_strings: bool = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages_json", "tools_json", "add_generation_prompt", "continue_final_message", "template_kwargs_json")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages_json: bytes
    tools_json: bytes
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs_json: bytes
    def __init__(self, messages_json: _Optional[bytes] = ..., tools_json: _Optional[bytes] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ..., template_kwargs_json: _Optional[bytes] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "block_hashes", "token_strings", "turn")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: bytes
    token_strings: _containers.RepeatedScalarFieldContainer[str]
    turn: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[bytes] = ..., token_strings: _Optional[_Iterable[str]] = ..., turn: _Optional[bytes] = ...) -> None: ...

class DecodeTextRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DecodeTextResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class TokenTextsRequest(_message.Message):
    __slots__ = ("model", "token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenTextsResponse(_message.Message):
    __slots__ = ("texts", "is_special")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    IS_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[bytes]
    is_special: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, texts: _Optional[_Iterable[bytes]] = ..., is_special: _Optional[_Iterable[bool]] = ...) -> None: ...

class DetokenizeBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[DetokenizeItem]
    def __init__(self, items: _Optional[_Iterable[_Union[DetokenizeItem, _Mapping]]] = ...) -> None: ...

class DetokenizeItem(_message.Message):
    __slots__ = ("stream_id", "open", "token_ids", "flush", "close")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    open: DetokenizeOpen
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    flush: bool
    close: bool
    def __init__(self, stream_id: _Optional[int] = ..., open: _Optional[_Union[DetokenizeOpen, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., flush: bool = ..., close: bool = ...) -> None: ...

class DetokenizeOpen(_message.Message):
    __slots__ = ("model", "stop", "include_stop_in_output", "skip_special_tokens", "turn")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    model: str
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_in_output: bool
    skip_special_tokens: bool
    turn: bytes
    def __init__(self, model: _Optional[str] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_in_output: bool = ..., skip_special_tokens: bool = ..., turn: _Optional[bytes] = ...) -> None: ...

class TextBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TextItem]
    def __init__(self, items: _Optional[_Iterable[_Union[TextItem, _Mapping]]] = ...) -> None: ...

class TextItem(_message.Message):
    __slots__ = ("stream_id", "text", "num_tokens", "matched_stop", "finished", "error")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    text: str
    num_tokens: int
    matched_stop: str
    finished: bool
    error: _common_pb2.ErrorDetail
    def __init__(self, stream_id: _Optional[int] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., matched_stop: _Optional[str] = ..., finished: bool = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class DescribeModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class DescribeModelResponse(_message.Message):
    __slots__ = ("model", "vocab_size", "eos_token_ids", "bos_token_id", "chat_template", "tool_chat_template")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    chat_template: str
    tool_chat_template: str
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., chat_template: _Optional[str] = ..., tool_chat_template: _Optional[str] = ...) -> None: ...
