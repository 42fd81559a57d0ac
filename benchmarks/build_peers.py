"""Build llama.cpp's own programs in .tools/peers, from the same source as cLLM's llama.cpp."""

from cllm.bench.peers import BUILT, build

build(BUILT, print)
