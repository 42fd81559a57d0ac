"""POST /v1/rerank, in the format that Jina, Cohere, vLLM and llama-server share, or with ``texts``
in that of TEI.
"""

from __future__ import annotations

import secrets
from typing import Annotated, ClassVar, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field, with_config
from starlette.requests import Request
from typing_extensions import TypedDict

from cllm.errors import BadRequest
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.call import get_call
from cllm.server.http.sse import until_disconnect
from cllm.server.queueing import SchedulingBody
from cllm.server.resolve import service_for
from cllm.serving.embedding import rank

router = APIRouter(tags=["cLLM"])

MAX_DOCUMENTS = 2000


NotEmpty = Annotated[str, Field(min_length=1)]


class Document(Body):
    text: NotEmpty


class RerankBody(SchedulingBody):
    """A query, and the documents to rank."""

    ignored: ClassVar = {
        "raw_scores": "scores are always the model's own",
        "truncate": "documents are never truncated; one that does not fit gets 400",
        "truncation_direction": "documents are never truncated; one that does not fit gets 400",
        "rank_fields": "documents are texts",
        "max_chunks_per_doc": "documents are never truncated; one that does not fit gets 400",
        "max_tokens_per_doc": "documents are never truncated; one that does not fit gets 400",
    }

    model_config = example(
        query="Where is Paris?",
        documents=["Berlin is in Germany.", "Paris is in France."],
        return_documents=True,
    )

    model: str | None = None
    query: NotEmpty
    documents: (
        Annotated[list[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)] | None
    ) = None
    texts: Annotated[list[NotEmpty], Field(min_length=1, max_length=MAX_DOCUMENTS)] | None = Field(
        default=None,
        description="The documents, in the form of Text Embeddings Inference; the answer then is "
        "a list.",
    )
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False

    def given(self) -> tuple[str, list[str]]:
        """Return the field that has the documents, and their texts.

        Raises BadRequest if none or both are given.
        """
        if self.texts is not None and self.documents is not None:
            raise BadRequest(
                "'texts' and 'documents' cannot be combined.", param="texts", code="invalid_value"
            )
        if self.texts is not None:
            return "texts", self.texts
        if self.documents is None:
            message = "Missing required parameter: 'documents'."
            raise BadRequest(message, param="documents", code="missing_required_parameter")
        return "documents", [
            document if isinstance(document, str) else document.text for document in self.documents
        ]


class RankedDocument(TypedDict):
    text: str


class RankedResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RankedUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


@with_config(
    example(
        id="rerank-1",
        object="list",
        model="cllm-builtin",
        method="cosine_similarity",
        results=[{"index": 1, "relevance_score": 0.93}, {"index": 0, "relevance_score": 0.41}],
        usage={"prompt_tokens": 19, "total_tokens": 19},
    )
)
class RankingAnswer(TypedDict):
    id: str
    object: Literal["list"]
    model: str
    method: Literal["reranker", "cosine_similarity"]
    results: list[RankedResult]
    usage: RankedUsage


class RankedText(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


@router.post("/v1/rerank", openapi_extra=describe_route(RerankBody))
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(request: Request) -> RankingAnswer | list[RankedText]:
    """Rank documents by how well they match the query.

    A reranking model gives its own scores. With any other model, a score is the cosine similarity
    of the query's and the document's embedding. ``method`` in the answer says which: ``reranker``
    or ``cosine_similarity``. If the documents were given as ``texts``, the answer is a list.
    """
    body = await read_body(request, RerankBody)
    service = await service_for(request, body.model)
    param, documents = body.given()
    ranking = await until_disconnect(
        request,
        rank(service, body.query, documents, body.scheduling_options(get_call(request)), param),
    )
    order = sorted(range(len(documents)), key=lambda i: -ranking.scores[i])[: body.top_n]
    if body.texts is not None:
        texts: list[RankedText] = [{"index": i, "score": ranking.scores[i]} for i in order]
        for text in texts if body.return_text else ():
            text["text"] = documents[text["index"]]
        return texts
    results: list[RankedResult] = [
        {"index": i, "relevance_score": ranking.scores[i]} for i in order
    ]
    for result in results if body.return_documents else ():
        result["document"] = {"text": documents[result["index"]]}
    return {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": service.model_name,
        "method": "reranker" if ranking.by_model else "cosine_similarity",
        "results": results,
        "usage": {"prompt_tokens": ranking.num_tokens, "total_tokens": ranking.num_tokens},
    }
