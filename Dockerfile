# leakbench in a container, with the pinned versions of pyproject.toml:
#
#     docker build -t leakbench .                           # torch with CUDA
#     docker build -t leakbench --build-arg TORCH=cpu .     # torch for the CPU only
#     docker run --rm -v "$PWD:/runs" leakbench run quick --device cpu
#     docker run --rm --gpus all -v "$PWD:/runs" -v ~/data:/data:ro leakbench run full --device cuda
FROM python:3.11-slim
ARG TORCH=
RUN pip install --no-cache-dir uv
WORKDIR /leakbench
COPY . .
RUN uv pip install --system --no-cache --compile-bytecode ${TORCH:+--torch-backend "$TORCH"} .
ENV LEAKBENCH_DATA=/data
WORKDIR /runs
ENTRYPOINT ["leakbench"]
