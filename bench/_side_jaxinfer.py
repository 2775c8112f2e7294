"""jaxinfer as a process that generates on request: see ``_answers.py``."""

from __future__ import annotations

from _answers import answers_only, serve, side_parser, timed_generation


def main() -> None:
    parser = side_parser("jaxinfer, generating on request.")
    parser.add_argument("--slots", type=int, default=32)
    options = parser.parse_args()
    answers = answers_only()
    import jax

    from jaxinfer import LLM, SamplingParams

    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_slots=options.slots,
        max_context=options.context,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in tokens]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    serve(timed_generation(generate), answers, {"jax": jax.__version__, "dtype": options.dtype, "slots": options.slots})


if __name__ == "__main__":
    main()
