"""Build llama.cpp's own programs from the very source that cLLM runs on, in .tools/peers."""

from cllm.bench.peers import BUILT, build

build(BUILT, print)
