"""``python -m cllm`` is ``cllm``."""

from cllm.cli.main import main

main()
