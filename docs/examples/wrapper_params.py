"""A wrapper of a language model as a function of its parameters: training and mixtures.

`TransformersWrapper` runs the weights of its model. Given a tree, `wrapper(td, params=tree)`,
it runs the tree instead, and the model stays as it is: so the score of a text is a
function of the weights, which has gradients and takes any edit of a tree. The weights
here are random, and the tokenizer has five words.

Run it with: python wrapper_params.py
"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tdfunc as tdf
from tdfunc import TensorDict
from tdfunc.llm import Text, TransformersWrapper

WORDS = ["<pad>", "</s>", "the", "cat", "dog", "sat", "ran"]


def make_wrapper() -> TransformersWrapper:
    """Return a wrapper of a small random model that scores texts."""
    torch.manual_seed(0)
    vocab = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<pad>"))
    vocab.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocab, pad_token="<pad>", eos_token="</s>"
    )
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="text", generate=False, pad_output=True
    )


def main() -> None:
    """Score with a tree, step it, mix two trees; the model keeps its weights."""
    wrapper = make_wrapper()
    params, _ = tdf.split(tdf.from_module(wrapper.model))
    lines = ["the cat sat", "the dog ran"]
    texts = TensorDict({"text": Text(full=lines, batch_size=[2])}, [2])

    def loss(params: TensorDict) -> Tensor:
        """Return minus the mean log-prob of the tokens of both texts."""
        return -wrapper(texts, params=params)["log_probs"].full[:, 1:].mean()

    grads, first = torch.func.grad_and_value(loss)(params)
    optimizer = tdf.optim.adamw(lr=1e-2)
    trained, state = params.clone(), optimizer.init(params)
    for _ in range(20):
        grads = torch.func.grad(loss)(trained)
        trained, state = optimizer.update(trained, grads, state)
    last = loss(trained)
    print(f"loss of the tree: {first:.3f}, after 20 steps {last:.3f}")
    assert last < 0.5 * first

    # Any edit of a tree is a model to score by: here the weights between both.
    halfway = loss(params.lerp(trained, 0.5))
    print(f"loss halfway between the two: {halfway:.3f}")
    assert last < halfway < first

    # Without a tree the wrapper runs its model, which nothing has written to.
    own = -wrapper(texts)["log_probs"].full[:, 1:].mean()
    torch.testing.assert_close(own, first)


if __name__ == "__main__":
    main()
