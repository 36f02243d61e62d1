# syntax=docker/dockerfile:1
#
# Two servers, two targets:
#   docker build --target policy -t gated-serving-policy .     exported policies; no torch, no GPU
#   docker build --target llm    -t gated-serving-llm .        gated language models, on vLLM's own image
# deploy/compose.yaml starts both, with Prometheus and Grafana.

ARG PYTHON_VERSION=3.11
ARG VLLM_VERSION=v0.32.0

FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY gated_serving gated_serving
COPY loadtest loadtest
COPY plugins plugins
COPY policy_server policy_server
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


FROM python:${PYTHON_VERSION}-slim-bookworm AS policy
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GATED_SERVING_POLICY_REPOSITORY=/models \
    GATED_SERVING_POLICY_HOST=0.0.0.0
COPY constraints/policy.txt /tmp/constraints.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-compile --constraint /tmp/constraints.txt "$(echo /wheels/*.whl)[policy]"
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin serving
# A named volume mounted here for the first time takes over the shipped policy; a folder of your own hides it.
COPY --chown=10001:10001 policy_server/pretrained /models
VOLUME /models
USER 10001
EXPOSE 8100
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8100/readyz', timeout=2)"]
ENTRYPOINT ["gated-serving"]
CMD ["serve-policy"]


FROM vllm/vllm-openai:${VLLM_VERSION} AS llm
ENV PYTHONUNBUFFERED=1 \
    HF_HOME=/models/huggingface
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/*.whl
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin serving \
    && install --directory --owner=10001 --group=10001 /models
VOLUME /models
USER 10001
WORKDIR /models
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["gated-serving"]
CMD ["serve", "--host", "0.0.0.0"]
