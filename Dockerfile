# syntax=docker/dockerfile:1
# cLLM for CPUs:   docker build -t cllm .
# For GPUs, see docs/install.md. BUILD_IMAGE and RUNTIME_IMAGE must be the same distribution.
ARG BUILD_IMAGE=python:3.13-slim-bookworm
ARG RUNTIME_IMAGE=python:3.13-slim-bookworm

FROM ${BUILD_IMAGE} AS builder
# GPU: empty, cuda, vulkan or rocm. BUILD_PACKAGES: what its compilation needs.
ARG GPU=
ARG CMAKE_ARGS=
ARG BUILD_PACKAGES=
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ${BUILD_PACKAGES} \
       $(command -v python3 >/dev/null || echo python3-venv) \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir "uv>=0.9,<1"
ENV PATH=/opt/uv/bin:${PATH} UV_PYTHON_DOWNLOADS=never
WORKDIR /source
COPY . .
# The locked versions of all dependencies; the companion wheel takes the place of llama-cpp-python.
RUN mkdir /wheels && uv export --frozen --quiet --no-dev --no-emit-project --no-emit-package llama-cpp-python \
       --output-file /wheels/requirements.txt
RUN --mount=type=cache,target=/source/.tools \
    python3 tools/build_wheels.py --out /wheels ${GPU:+--gpu ${GPU}} --cmake-args="${CMAKE_ARGS}"

FROM ${RUNTIME_IMAGE}
ARG RUNTIME_PACKAGES=
ENV DEBIAN_FRONTEND=noninteractive
RUN needed="${RUNTIME_PACKAGES} $(command -v python3 >/dev/null || echo python3-venv)" \
    && if [ -n "${needed# }" ]; then \
         apt-get update && apt-get install --yes --no-install-recommends ${needed} \
         && rm -rf /var/lib/apt/lists/*; \
       fi
RUN --mount=type=bind,from=builder,source=/wheels,target=/wheels \
    python3 -m venv /opt/cllm \
    && /opt/cllm/bin/pip install --no-cache-dir --require-hashes --requirement /wheels/requirements.txt \
    && /opt/cllm/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
RUN groupadd --gid 10001 cllm \
    && useradd --uid 10001 --gid cllm --no-create-home --home-dir /data --shell /usr/sbin/nologin cllm \
    && install --directory --owner=cllm --group=cllm --mode=0700 /data
# Downloaded models, keys and the files of clients are in /data; nothing else is written but /tmp.
ENV HOME=/data PATH=/opt/cllm/bin:${PATH} CLLM_SERVER_HOST=0.0.0.0
VOLUME /data
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=9)"]
ENTRYPOINT ["cllm"]
CMD ["serve"]
