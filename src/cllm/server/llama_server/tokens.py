"""/tokenize, /detokenize and /apply-template, which accept the parameters of llama-server and of
vLLM.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from fastapi import APIRouter
from pydantic import Field, with_config
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.segments import Segment
from cllm.core.vocabulary import VocabularyTable
from cllm.errors import BadRequest
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.body_limits import MAX_VALUES
from cllm.server.call import get_call
from cllm.server.http.sse import until_disconnect
from cllm.server.off_loop import off_loop
from cllm.server.openai.conversation import (
    MAX_TOOLS,
    ChatMessage,
    ChatTool,
    TemplateVariables,
    continue_chat,
    drop_nulls,
)
from cllm.server.resolve import service_for
from cllm.serving.service import Service
from cllm.text.chat import Chat
from cllm.text.templates.fences import OPEN, remove_fences

router = APIRouter(tags=["Tokens"])

MAX_TOKENS = 1_000_000  # in an answer that has only token ids
MAX_PIECES = 100_000  # in an answer that also has the tokens' texts


class ConversationBody(Body):
    """Parameters of the chat template, without the messages."""

    refused: ClassVar = {
        "chat_template": "the model's own template is used",
    }

    model: str | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(
        default=False, description="End the prompt where the last message, an assistant's, ends."
    )
    chat_template_kwargs: TemplateVariables | None = None


class TemplateBody(ConversationBody):
    """A conversation, as in chat completions."""

    model_config = example(messages=[{"role": "user", "content": "What is 27 plus 45?"}])

    messages: Annotated[list[ChatMessage], Field(min_length=1)]


class TokenizeBody(ConversationBody):
    """Give one of ``content``, ``prompt`` and ``messages``.

    The tokens that the model expects before and after a text are added to ``prompt`` by default (as
    in vLLM), but not to ``content`` (as in llama-server).
    """

    model_config = example(content="What is 27 plus 45?", with_pieces=True)

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model_config = example(tokens=[72, 105])

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_VALUES)]


class TokenPiece(TypedDict):
    id: int
    piece: str | list[int]


@with_config(example(tokens=[72, 105], count=2, max_model_len=4096, token_strs=None))
class TokenizeAnswer(TypedDict):
    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None


@with_config(example(content="Hi", prompt="Hi"))
class DetokenizeAnswer(TypedDict):
    content: str
    prompt: str


@with_config(example(prompt="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"))
class TemplateAnswer(TypedDict):
    prompt: str


@router.post("/tokenize", openapi_extra=describe_route(TokenizeBody, TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation in the model's chat template.

    With ``with_pieces`` or ``return_token_strs``, also return the text of each token.
    """
    body = await read_body(request, TokenizeBody)
    service = await service_for(request, body.model)
    given = [name for name in ("content", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        message = (
            f"Invalid 'content': exactly one of content, prompt and messages is required, "
            f"not {len(given)}."
        )
        raise BadRequest(message, param="content", code="invalid_value")
    tokens = await until_disconnect(request, encode(request, service, body))
    content = await off_loop(get_call(request), lambda: format_tokens(service, body, tokens))
    return Response(content, media_type="application/json")


async def encode(request: Request, service: Service, body: TokenizeBody) -> list[int]:
    """Return the tokens of the text or the conversation. Raises BadRequest."""
    if body.messages is not None:
        text = await render(request, service, body.messages, body)
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
    num_characters = len(text) - 2 * text.count(OPEN)
    check_count(body, service.least_tokens(num_characters), "at least ")
    if body.messages is not None:
        return (await service.encode_rendered(text, "messages")).tokens
    asked = body.add_special if body.add_special is not None else body.add_special_tokens
    add_special = asked if asked is not None else body.prompt is not None
    [tokens] = await service.tokenize([Segment(text, add_special, body.parse_special)])
    return tokens


def format_tokens(service: Service, body: TokenizeBody, tokens: list[int]) -> bytes:
    """Return the answer as JSON. Raises BadRequest if there are too many tokens."""
    check_count(body, len(tokens))
    vocabulary = service.vocabulary
    content: TokenizeAnswer = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.info.context_length,
        "token_strs": None,
    }
    if body.with_pieces:
        content["tokens"] = [
            TokenPiece(id=one, piece=describe_piece(vocabulary, one)) for one in tokens
        ]
    if body.return_token_strs:
        content["token_strs"] = [
            vocabulary.find_text(token).decode("utf-8", "replace") for token in tokens
        ]
    return to_json(content)


def check_count(body: TokenizeBody, num_tokens: int, bound: str = "") -> None:
    """Raise BadRequest if there are too many tokens. ``bound`` comes before their number, such as
    "at least ".
    """
    has_pieces = body.with_pieces or body.return_token_strs
    limit = MAX_PIECES if has_pieces else MAX_TOKENS
    if num_tokens > limit:
        what = "with_pieces and return_token_strs" if has_pieces else "/tokenize"
        message = f"{what} accepts texts of up to {limit} tokens; this one has {bound}{num_tokens}."
        raise BadRequest(
            message, param="with_pieces" if body.with_pieces else None, code="too_many_tokens"
        )


@router.post("/detokenize", openapi_extra=describe_route(DetokenizeBody, DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with control tokens by name.

    ``content`` and ``prompt`` are the same text.
    """
    body = await read_body(request, DetokenizeBody)
    service = await service_for(request, body.model)
    text = await off_loop(get_call(request), lambda: decode_tokens(service, body.tokens))
    return Response(
        to_json(DetokenizeAnswer(content=text, prompt=text)), media_type="application/json"
    )


@router.post("/apply-template", openapi_extra=describe_route(TemplateBody, TemplateAnswer))
async def apply_template(request: Request) -> Response:
    """Render messages with the model's chat template, and return the prompt.

    Nothing is generated.
    """
    body = await read_body(request, TemplateBody)
    service = await service_for(request, body.model)
    text = await until_disconnect(request, render(request, service, body.messages, body))
    content = await off_loop(
        get_call(request), lambda: to_json(TemplateAnswer(prompt=remove_fences(text)))
    )
    return Response(content, media_type="application/json")


async def render(
    request: Request, service: Service, messages: list[ChatMessage], body: ConversationBody
) -> str:
    """Return the rendered conversation, with fences around parts that are tokenized as plain text.

    Raises BadRequest.
    """

    def translate() -> Chat:
        chat = Chat(
            [message.for_template(f"messages[{i}]") for i, message in enumerate(messages)],
            [tool.model_dump(exclude_none=True) for tool in body.tools or []],
            variables={
                "add_generation_prompt": body.add_generation_prompt,
                **drop_nulls(body.chat_template_kwargs),
            },
        )
        return continue_chat(chat) if body.continue_final_message else chat

    return await service.render_chat(await off_loop(get_call(request), translate))


def decode_tokens(service: Service, tokens: list[int]) -> str:
    """Return the text of ``tokens``. Raises BadRequest for ids that are not in the vocabulary."""
    size = service.vocabulary.size
    for i, token in enumerate(tokens):
        if not 0 <= token < size:
            message = f"Invalid 'tokens[{i}]': token ids must be between 0 and {size - 1}."
            raise BadRequest(message, param=f"tokens[{i}]", code="invalid_value")
    return b"".join(map(service.vocabulary.find_text, tokens)).decode("utf-8", "replace")


def describe_piece(vocabulary: VocabularyTable, token: int) -> str | list[int]:
    """Return the text of a token, or its bytes if they are not valid UTF-8."""
    data = vocabulary.find_text(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
