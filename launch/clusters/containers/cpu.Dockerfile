# Pronk without GPUs, from the project's folder:
#   docker build -f launch/clusters/containers/cpu.Dockerfile -t pronk .
FROM python:3.12-bookworm
RUN apt-get update -qq && apt-get install -qq -y make python3-venv
WORKDIR /opt/pronk
COPY . .
RUN make env
CMD [".venv/bin/python", "launch/doctor.py"]
