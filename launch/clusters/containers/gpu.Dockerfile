# Pronk and SGLang's server on NVIDIA GPUs, from the project's folder:
#   docker build -f launch/clusters/containers/gpu.Dockerfile -t pronk .
# No GPU is there while an image is built, hence GPUS=yes.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update -qq && apt-get install -qq -y make python3-venv python3-dev
WORKDIR /opt/pronk
COPY . .
RUN make env GPUS=yes
RUN make sglang-env GPUS=yes
CMD [".venv/bin/python", "launch/doctor.py"]
