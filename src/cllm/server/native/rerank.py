"""POST /v1/rerank, in the words that Jina, Cohere, vLLM and llama-server share."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from cllm.embedding import rank
from cllm.errors import BadRequest
from cllm.server.body import Body, documented, example, read_body
from cllm.server.native.answers import Ranking
from cllm.server.queueing import TermsBody
from cllm.server.sse import until_disconnect
from cllm.service import Service

router = APIRouter(tags=["cLLM"])

MAX_DOCUMENTS = 2000


class Document(Body):
    text: Annotated[str, Field(min_length=1)]


class RerankBody(TermsBody):
    """A query, and the documents that may answer it."""

    ignored: ClassVar = {
        "rank_fields": "documents are texts",
        "max_chunks_per_doc": "documents are read whole, or refused",
        "max_tokens_per_doc": "documents are read whole, or refused",
    }

    model_config = example(
        query="Where is Paris?", documents=["Berlin is in Germany.", "Paris is in France."], return_documents=True
    )

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False


@router.post("/v1/rerank", openapi_extra=documented(RerankBody, Ranking))
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Documents in the order of how well they fit the query.

    A model that was made to rank gives its own score. Any other model's is the cosine of the two embeddings, and the
    answer says so: ``method`` is ``reranker`` or ``cosine_similarity``.
    """
    service: Service = request.app.state.service
    body = await read_body(request, RerankBody)
    if body.model is not None and not service.serves(body.model):
        message = f"The model {body.model[:100]!r} does not exist; this server has {service.model_name!r}."
        raise BadRequest(message, param="model", code="model_not_found", status=404)
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    ranking = await until_disconnect(request, rank(service, body.query, documents, body.terms(request)))
    order = sorted(range(len(documents)), key=lambda i: -ranking.scores[i])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": ranking.scores[i]} for i in order]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    content = {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": service.model_name,
        "method": "reranker" if ranking.by_model else "cosine_similarity",
        "results": results,
        "usage": {"prompt_tokens": ranking.num_tokens, "total_tokens": ranking.num_tokens},
    }
    return Response(to_json(content), media_type="application/json")
