"""Score one sequence with a running teacher service."""

from hybrid_gkd.models.tokenizer import load_tokenizer, tokenizer_hash
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Reading

tokenizer = load_tokenizer("Qwen/Qwen3-0.6B")
token_ids = tokenizer.encode("2 + 2 = 4")  # a list, or an array
reading = Reading(token_ids=token_ids, positions=[len(token_ids) - 1])  # scored: any but the first, ascending
with TeacherClient(
    ["127.0.0.1:15555"], topk=64, vocab_size=len(tokenizer), keys="teacher_keys/client",
) as client:
    client.handshake(
        tokenizer_hash=tokenizer_hash(tokenizer), tokenizer_size=len(tokenizer), max_sequence_length=2048,
    )
    scores = [future.result() for future in client.submit([reading])]
print(scores[0].ids[0], scores[0].logprobs[0])  # the teacher's 64 candidates for the last token
