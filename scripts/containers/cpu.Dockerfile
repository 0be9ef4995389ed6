# Training and reinforcement learning on CPUs, from the pinned set rl-cpu. Build at the top of the checkout:
#   docker build -f scripts/containers/cpu.Dockerfile -t mimo-hetero:cpu .
#   docker run --rm -it mimo-hetero:cpu mimo --help
FROM python:3.12.11-slim-bookworm AS build
WORKDIR /opt/mimo-hetero
COPY pyproject.toml README.md LICENSE .python-version ./
COPY scripts/lib.sh scripts/setup.sh scripts/
COPY scripts/requirements scripts/requirements
COPY mimo mimo
COPY providers providers
COPY data data
# Whoever runs the image cannot write bytecode into .venv. Without it, every process would compile what it imports again,
# which doubles the time of its start.
ENV UV_COMPILE_BYTECODE=1
RUN bash scripts/setup.sh rl-cpu && .venv/bin/python -m compileall -q mimo providers data && rm -rf /root/.cache

FROM python:3.12.11-slim-bookworm
# vLLM compiles small functions for the CPU that it finds.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 mimo
COPY --from=build /opt/mimo-hetero /opt/mimo-hetero
COPY train_hetero.py train_rl.py /opt/mimo-hetero/
COPY scripts /opt/mimo-hetero/scripts
WORKDIR /opt/mimo-hetero
# Runs and data sets are written below the checkout, and caches in the home folder. Whoever runs the image may write to
# them, because `docker run --user` takes any number.
RUN mkdir -p runs datasets && chmod 1777 . runs datasets /home/mimo
ENV HOME=/home/mimo PATH=/opt/mimo-hetero/.venv/bin:$PATH
USER 1000
CMD ["mimo", "--help"]
