"""What is known of a request's samples from the outputs that vLLM gives out of them."""

from vllm.outputs import CompletionOutput, RequestOutput

from tllm.client.results import Samples


def sample(index, tokens, *, ends=None):
    return CompletionOutput(
        index,
        text=" ".join(map(str, tokens)),
        token_ids=list(tokens),
        cumulative_logprob=-1.0,
        logprobs=[{token: None} for token in tokens],
        finish_reason=ends,
        sampling_mask=object(),
    )


def output(*samples, finished=False):
    return RequestOutput("r", None, [1, 2], None, list(samples), finished)


def noted(samples, *outputs):
    for each in outputs:
        samples.add(each)
    samples.gather(outputs[-1])
    return outputs[-1].outputs


def test_a_sample_that_ended_before_is_in_the_last_output_as_it_was():
    early, late = sample(1, [7, 8], ends="stop"), sample(0, [3, 4, 5], ends="length")
    samples = Samples()
    whole = noted(samples, output(sample(0, [3])), output(early), output(late, finished=True))
    assert [each.index for each in whole] == [0, 1]
    assert whole[0] is late
    assert whole[1] is not early  # which the caller has: results belong to the last output
    assert vars(whole[1]) == vars(early)
    assert samples.tokens == {0: [3, 4, 5], 1: [7, 8]}
    assert samples.lengths == {0: 3, 1: 2}


def test_of_deltas_all_tokens_are_known_and_none_is_given_out_again():
    early = sample(0, [4], ends="stop")
    samples = Samples(deltas=True)
    begun, last = output(sample(0, [3]), sample(1, [7])), output(sample(1, [9], ends="length"))
    last.finished = True
    whole = noted(samples, begun, output(sample(1, [8]), early), last)
    assert [(each.index, list(each.token_ids)) for each in whole] == [(0, []), (1, [9])]
    assert (whole[0].text, whole[0].logprobs, whole[0].sampling_mask) == ("", [], None)
    assert whole[0].finish_reason == "stop"
    assert (early.text, list(early.token_ids)) == ("4", [4])
    assert samples.tokens == {0: [3, 4], 1: [7, 8, 9]}


def test_a_caller_may_merge_what_it_was_given():
    samples = Samples(deltas=True)
    merged = output(sample(0, [3]))
    samples.add(merged)
    for tokens, ends in (([4, 5], None), ([6], "stop")):
        following = output(sample(0, tokens, ends=ends), finished=ends is not None)
        for mask in (merged, following):
            mask.outputs[0].sampling_mask = None
        samples.add(following)
        merged.add(following, aggregate=True)
    assert list(merged.outputs[0].token_ids) == [3, 4, 5, 6]
    assert samples.tokens == {0: [3, 4, 5, 6]}


def test_a_streamed_prompt_may_be_over_without_an_end_of_its_sample():
    samples = Samples()
    noted(samples, output(sample(0, [3])), output(sample(0, [3, 4])))
    assert samples.tokens == {0: [3, 4]}
