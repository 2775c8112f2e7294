"""vLLM on the CPU as a process that generates on request (see ``_answers.py``); needs vllm, nothing of jaxinfer.

Its environment decides more than its arguments: VLLM_CPU_OMP_THREADS_BIND says which processors compute ("auto" leaves
one to the server), VLLM_CPU_KVCACHE_SPACE how many GiB the cache has.
"""

from __future__ import annotations

import os

from _answers import answers_only, serve, side_parser, timed_generation

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


def main() -> None:
    options = side_parser("vLLM on the CPU, generating on request.").parse_args()
    answers = answers_only()
    # They belong to the other environment, where this file runs.
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.context,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in tokens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, use_tqdm=False)]

    bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    serve(timed_generation(generate), answers, {"vllm": vllm.__version__, "dtype": options.dtype, "threads bind": bind})


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
