"""A real HTTP server with the two endpoints of vLLM, whose numbers are those of a tiny model of transformers."""

import contextlib
import functools
import json
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load_file

IDS, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
WEIGHTS = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info", "/v1/models")
EOS = 1


@functools.cache
def log_probs_of(model, ids):
    """The log-prob of each token after the first, and the logits of the next token."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    chosen = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(-1))
    return chosen.squeeze(-1).tolist(), logits[-1]


def respond(model, ids, options):
    """The tokens of a response, their raw log-probs, and the reason of its end."""
    generator = torch.Generator().manual_seed(options.get("seed") or 0)
    ends = set(options["stop_token_ids"]) | (set() if options["ignore_eos"] else {EOS})
    tokens, values = [], []
    for _ in range(options["max_tokens"]):
        logits = log_probs_of(model, (*ids, *tokens))[1]
        if options["temperature"] == 0:
            token = int(logits.argmax())
        else:
            scaled = logits / options["temperature"]
            if options["top_k"] > 0:
                scaled[scaled < scaled.topk(options["top_k"]).values[-1]] = -torch.inf
            token = int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
        tokens.append(token)
        values.append(float(logits.log_softmax(-1)[token]))
        if token in ends:
            return tokens, values, "stop"
    return tokens, values, "length"


class Service:
    """A server on a port of its own, which records its requests and can be made to fail.

    Attributes:
        faults: What happens to the next requests, one each; None is an answer. A function takes the handler.
        alter: A function that edits each object before it is sent.
        requests: The path, the body and the headers of each request.
        times: When each came.
        label: The version of the weights, where the server has the endpoints for weights.
        reload: The function that replaces the weights by those of a folder.
        resets: Whether the prefix cache is reset on request.
    """

    def __init__(self, model, *, ids_endpoint=True, token_ids=True, delay_s=0.0, label=None):
        self.label, self.reload, self.resets = label, self.read_weights, True
        self.model, self.ids_endpoint, self.token_ids, self.delay_s = model, ids_endpoint, token_ids, delay_s
        self.faults, self.requests, self.times, self.alter = [], [], [], lambda answer: answer
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": self}))
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        """Stop, so that the port refuses connections."""
        self.http.shutdown()
        self.http.server_close()

    @property
    def paths(self):
        return [path for path, _, _ in self.requests]

    def read_weights(self, folder):
        """Replace the weights, as vLLM does: by name, and without a word about those that are missing."""
        with torch.no_grad():
            for name, leaf in load_file(f"{folder}/model.safetensors").items():
                self.model.get_parameter(name).copy_(leaf)

    def weights(self, path, body):
        """The answer of an endpoint for weights."""
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.reload(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            if self.resets:
                log_probs_of.cache_clear()
            return {"success": self.resets}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        models = [{"id": "tiny", "max_model_len": 48}]
        return {"weight_version": self.label, "data": models}

    def objects(self, path, body):
        """The objects of an answer, as vLLM gives them: several for a stream."""
        if path == IDS:
            tokens, values, reason = respond(self.model, body["token_ids"], body["sampling_params"])
            entries = [{"token_id": t, "logprob": v, "rank": 1} for t, v in zip(tokens, values, strict=True)]
            parts = [
                {"token_ids": tokens[a:b], "logprobs": {"content": entries[a:b]}, "finish_reason": None}
                for a, b in self.spans(len(tokens), body)
            ]
            parts[-1] |= {
                "finish_reason": reason,
                "weight_versions": [{"version": each} for each in ([self.label] if self.label else ["7", "8"])],
            }
            return [{"request_id": "a", "choices": [{"index": 0, **part}]} for part in parts]
        prompt = body["prompt"]
        if body.get("echo") and body["max_tokens"] == 0:
            values = [None, *log_probs_of(self.model, tuple(prompt))[0]]
            named = {"token_logprobs": values, "tokens": [f"token_id:{t}" for t in prompt]}
            part = {"text": "", "logprobs": named, "finish_reason": "length"}
            parts = [part | ({"token_ids": [], "prompt_token_ids": prompt} if self.token_ids else {})]
        else:
            tokens, values, reason = respond(self.model, prompt, body)
            parts = [
                {"text": "".join(f"<{t}>" for t in tokens[a:b]), "logprobs": {"token_logprobs": values[a:b]}}
                | ({"token_ids": tokens[a:b], "prompt_token_ids": None if a else prompt} if self.token_ids else {})
                | {"finish_reason": None}
                for a, b in self.spans(len(tokens), body)
            ]
            if body.get("logprobs"):
                top = log_probs_of(self.model, tuple(prompt))[1].log_softmax(-1).topk(body["logprobs"])
                pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                parts[0]["logprobs"]["top_logprobs"] = [{f"token_id:{i}": value for i, value in pairs}]
            parts[-1]["finish_reason"] = reason
        return [{"id": "cmpl-a", "choices": [{"index": 0, **part}]} for part in parts]

    def spans(self, count, body):
        return [(i, i + 1) for i in range(count)] if body.get("stream") else [(0, count)]


class _Handler(BaseHTTPRequestHandler):
    """Answers for the service that the class has."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        """Answer, or fail by the next fault of the service."""
        service = self.service
        self.body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        with service.lock:
            service.requests.append((self.path, self.body, dict(self.headers)))
            service.times.append(time.monotonic())
            service.active += 1
            service.most_active = max(service.most_active, service.active)
            fault = service.faults.pop(0) if service.faults else None
        try:
            time.sleep(service.delay_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                (fault or answer)(self)
        finally:
            with service.lock:
                service.active -= 1

    def reply(self, status, answer, **headers):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(data)

    def begin(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, data):
        text = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    def end(self):
        self.wfile.write(b"0\r\n\r\n")


def answer(handler, pause_s=0.0):
    """Give the model's answer."""
    service, body = handler.service, handler.body
    if (handler.command == "GET") != (handler.path in WEIGHTS[3:]):
        return handler.reply(405, {"detail": "Method Not Allowed"})
    if handler.path in WEIGHTS and service.label is not None:
        return handler.reply(200, service.weights(handler.path, body))
    if handler.path not in ((IDS, COMPLETIONS) if service.ids_endpoint else (COMPLETIONS,)):
        return handler.reply(404, {"detail": "Not Found"})
    objects = [service.alter(each) for each in service.objects(handler.path, body)]
    if not body.get("stream"):
        return handler.reply(200, objects[0])
    handler.begin()
    for each in objects:
        time.sleep(pause_s)
        handler.event(each)
    handler.event("[DONE]")
    return handler.end()


def refuse(status, **headers):
    """Answer with a status."""
    return lambda handler: handler.reply(status, {"error": {"message": f"refused {status}", "code": status}}, **headers)


def reset(handler):
    """Break the connection without an answer."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def cut(count, *, clean):
    """Give the first objects of a stream, and end it as if it were whole, or break the connection."""

    def fault(handler):
        handler.begin()
        for each in handler.service.objects(handler.path, handler.body)[:count]:
            handler.event(each)
        handler.close_connection = True
        if clean:
            handler.event("[DONE]")
            handler.end()

    return fault


def report(error):
    """Begin a stream, and report an error in it."""

    def fault(handler):
        handler.begin()
        handler.event({"error": error})
        handler.event("[DONE]")
        handler.end()

    return fault
