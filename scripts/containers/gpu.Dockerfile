# Training and reinforcement learning on NVIDIA GPUs, from the pinned set rl-gpu. The host needs driver 580 or newer and
# the NVIDIA container toolkit. Build at the top of the checkout:
#   docker build -f scripts/containers/gpu.Dockerfile -t mimo-hetero:gpu .
#   docker run --rm -it mimo-hetero:gpu mimo --help
#
# Transformer Engine's PyTorch part is compiled if there is no wheel of it for the pinned PyTorch, so this stage has the
# CUDA toolkit. The packages bring CUDA's libraries, so the last stage needs only the driver of the host.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mimo-hetero
COPY pyproject.toml README.md LICENSE .python-version ./
COPY scripts/lib.sh scripts/setup.sh scripts/
COPY scripts/requirements scripts/requirements
COPY mimo mimo
COPY providers providers
COPY data data
ENV CUDA_HOME=/usr/local/cuda
# Whoever runs the image cannot write bytecode into .venv. Without it, every process would compile what it imports again,
# which doubles the time of its start.
ENV UV_COMPILE_BYTECODE=1
RUN bash scripts/setup.sh rl-gpu && .venv/bin/python -m compileall -q mimo providers data && rm -rf /root/.cache

FROM ubuntu:24.04
# Triton and vLLM compile kernels when they first run, with a C compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 1001 mimo
COPY --from=build /opt/mimo-hetero /opt/mimo-hetero
COPY train_hetero.py train_rl.py /opt/mimo-hetero/
COPY scripts /opt/mimo-hetero/scripts
WORKDIR /opt/mimo-hetero
# Runs and data sets are written below the checkout, and caches in the home folder. Whoever runs the image may write to
# them, because `docker run --user` takes any number.
RUN mkdir -p runs datasets && chmod 1777 . runs datasets /home/mimo
ENV HOME=/home/mimo PATH=/opt/mimo-hetero/.venv/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1001
CMD ["mimo", "--help"]
