"""A web service with an endpoint of its own around a model.

    pip install uvicorn
    uvicorn --app-dir examples fastapi_app:app
    curl localhost:8000/ask -H "Content-Type: application/json" \\
        -d '{"question": "What is 27 plus 45?"}'

Requests that arrive at the same time share the batch. When a client of /stream disconnects, its
sequence is freed. For OpenAI's API, limits and metrics, use ``cllm serve`` instead.
"""

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from cllm import AsyncLLM, BadRequest, SamplingParams

llm = AsyncLLM(os.environ.get("MODEL"), model_max_context_length=2048)
PARAMS = SamplingParams(temperature=0, max_tokens=500)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with llm:
        yield


app = FastAPI(lifespan=lifespan)


class Question(BaseModel):
    question: str = Field(min_length=1, max_length=4000)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


class Answer(BaseModel):
    answer: str
    num_tokens: int


@app.post("/ask")
async def ask(body: Question) -> Answer:
    try:
        done = await llm.chat(body.messages, PARAMS)
    except BadRequest as error:
        raise HTTPException(400, str(error)) from None
    return Answer(answer=done.text, num_tokens=len(done.outputs[0].tokens))


@app.post("/stream")
async def stream(body: Question) -> StreamingResponse:
    async def texts() -> AsyncIterator[str]:
        async with aclosing(llm.stream_chat(body.messages, PARAMS)) as pieces:
            async for piece in pieces:
                yield piece.text

    return StreamingResponse(texts(), media_type="text/plain")
