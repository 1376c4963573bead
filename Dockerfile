# One file, an image for each kind of service:
#   light      gateway, tokenizer, grammar, router: no torch, no numpy
#   scheduler
#   worker     torch; it also fetches and converts models
#
# PyPI's torch for Linux brings the CUDA libraries. For CPUs alone, name an index with CPU builds, and the image is gigabytes
# smaller: docker compose build --build-arg PIP_EXTRA_INDEX_URL=...

ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 1000 --create-home radixmesh && mkdir /models && chown radixmesh /models
WORKDIR /home/radixmesh

FROM base AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
WORKDIR /src
# Dependencies first: this layer holds until they change, not until the code does.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir radixmesh services shared && touch radixmesh/__init__.py services/__init__.py shared/__init__.py

FROM build AS build-light
RUN pip install --quiet --constraint constraints.txt '.[gateway,tokenizer,grammar,router,telemetry]'
COPY . .
RUN pip install --quiet --no-deps .

FROM build AS build-scheduler
RUN pip install --quiet --constraint constraints.txt '.[scheduler,telemetry]'
COPY . .
RUN pip install --quiet --no-deps .

FROM build AS build-worker
RUN pip install --quiet --constraint constraints.txt '.[worker,client,telemetry]'
COPY . .
RUN pip install --quiet --no-deps .

# A container runs one service, named after its host so that its health check finds it. `exec`: signals reach it.
FROM base AS service
USER radixmesh
ENTRYPOINT ["/bin/sh", "-c", "RADIXMESH_INSTANCE=$HOSTNAME exec python -m services \"$0\" \"$@\""]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/bin/sh", "-c", "exec python -m shared.probe --instance \"$HOSTNAME\""]

FROM service AS light
COPY --from=build-light /opt/venv /opt/venv
EXPOSE 8000
CMD ["gateway"]

FROM service AS scheduler
COPY --from=build-scheduler /opt/venv /opt/venv
CMD ["scheduler"]

FROM service AS worker
COPY --from=build-worker /opt/venv /opt/venv
ENV RADIXMESH_CACHE=/models HF_HOME=/models/hub
VOLUME /models
CMD ["worker"]
