"""Drawing responses: options, samplers, the decoding loop and beams over any causal language model."""
