"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, with_config
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.errors import BadRequest
from cllm.server.body import describe_route, example, read_body
from cllm.server.call import Call, get_call
from cllm.server.http.sse import until_disconnect
from cllm.server.queueing import SchedulingBody
from cllm.server.resolve import service_for
from cllm.server.vectors import encode_vectors
from cllm.serving.embedding import embed, encode_texts, shorten
from cllm.serving.service import Service
from cllm.text.pairs import name_texts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

router = APIRouter(tags=["OpenAI"])

MAX_INPUTS = 2048


class EmbeddingsBody(SchedulingBody):
    """Texts or their token ids, and the format of the embeddings."""

    model_config = example(
        input=["What is 27 plus 45?", "Paris is in France."], encoding_format="float"
    )

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """Return one or more texts, or their token ids.

        Raises BadRequest if there are none or too many.
        """
        inputs: Any = self.input
        if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)):
            inputs = [inputs]
        if not 1 <= len(inputs) <= MAX_INPUTS:
            message = f"Invalid 'input': 1 to {MAX_INPUTS} texts are accepted, not {len(inputs)}."
            raise BadRequest(message, param="input", code="invalid_value")
        checked: list[str] | list[list[int]] = inputs
        return checked

    def names(self, count: int) -> list[str]:
        """Return the names of the inputs in errors."""
        is_list = isinstance(self.input, list) and not isinstance(self.input[0], int)
        return name_texts("input", count) if is_list else ["input"]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingHead(TypedDict):
    object: Literal["list"]
    model: str
    usage: EmbeddingUsage


class EmbeddingObject(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@with_config(
    example(
        object="list",
        model="cllm-builtin",
        data=[{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
        usage={"prompt_tokens": 5, "total_tokens": 5},
    )
)
class EmbeddingList(EmbeddingHead):
    data: list[EmbeddingObject]


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", openapi_extra=describe_route(EmbeddingsBody, EmbeddingList))
async def embeddings(request: Request) -> Response:
    """Return the embeddings of texts.

    Their length is 1, so the dot product of two is the similarity of their texts.
    """
    body = await read_body(request, EmbeddingsBody)
    service = await service_for(request, body.model)
    content = await until_disconnect(request, embedding_list(get_call(request), service, body))
    return Response(content, media_type="application/json")


async def embedding_list(call: Call, service: Service, body: EmbeddingsBody) -> bytes:
    """Return the embeddings of the inputs of ``body``, as JSON. Raises BadRequest."""
    size = service.info.embedding_size
    if body.dimensions is not None and size and body.dimensions > size:
        message = f"Invalid 'dimensions': it must be at most {size}, not {body.dimensions}."
        raise BadRequest(message, param="dimensions", code="integer_above_max_value")
    inputs = body.inputs()
    params = body.names(len(inputs))
    scheduling = body.scheduling_options(call)
    texts = await encode_texts(service, inputs, params, scheduling)
    embedding = await embed(service, texts, params, scheduling)
    vectors = shorten(embedding.vectors, body.dimensions)
    head: EmbeddingHead = {
        "object": "list",
        "model": service.model_name,
        "usage": {"prompt_tokens": embedding.num_tokens, "total_tokens": embedding.num_tokens},
    }
    as_base64 = body.encoding_format == "base64"

    def write(i: int, vector: npt.NDArray[np.float32]) -> bytes:
        number = (
            base64.b64encode(vector.astype("<f4").tobytes()).decode()
            if as_base64
            else vector.tolist()
        )
        return to_json(EmbeddingObject(object="embedding", index=i, embedding=number))

    data = await encode_vectors(vectors, write)
    return to_json(head)[:-1] + b',"data":[' + data + b"]}"
