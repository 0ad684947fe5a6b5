"""The request trace: one row a request and round. The one format that every engine path produces."""

import pyarrow as pa

# Times are seconds on one monotonic clock, counted from the round's origin; null where the event never came.
# Token counts are the server's usage, null where it reported none.
TRACE_SCHEMA = pa.schema(
    [
        ("round", pa.int32()),
        ("request", pa.int32()),  # index in the workload
        ("worker", pa.int16()),  # client process that sent it
        ("intended_s", pa.float64()),  # when the request was due
        ("sent_s", pa.float64()),  # when its bytes were handed to the transport
        ("first_token_s", pa.float64()),  # first chunk that carried a token
        ("last_token_s", pa.float64()),  # last chunk that carried a token
        ("end_s", pa.float64()),  # response complete, or failure noticed
        ("chunk_s", pa.list_(pa.float64())),  # every chunk that carried a token, first to last
        # the engine core's own times, where it tells them
        ("engine_queued_s", pa.float64()),
        ("engine_scheduled_s", pa.float64()),
        ("engine_first_token_s", pa.float64()),
        ("engine_last_token_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("finish_reason", pa.dictionary(pa.int8(), pa.string())),
        ("error", pa.string()),  # null: the request completed
        ("text", pa.string()),  # generated text, where the workload asks for it
        ("logprobs", pa.string()),  # JSON of the first token's alternatives, where the workload asks for it
    ]
)
