"""A reward service for --rm-type remote_rm, with the standard library alone: the brighter an image, the better.

python reward_server.py 8000
miles train tiny --rm-type remote_rm --rm-url http://127.0.0.1:8000/score
"""

import base64
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image, ImageStat


class Score(BaseHTTPRequestHandler):
    """Answers {"samples": [{"image": PNG as base64, "prompt": …}, …]} with {"rewards": [a number each]}."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        images = [Image.open(io.BytesIO(base64.b64decode(sample["image"]))) for sample in asked["samples"]]
        rewards = [sum(ImageStat.Stat(image.convert("RGB")).mean) / 3 / 255 for image in images]
        answer = json.dumps({"rewards": rewards, "version": "brightness-1"}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing: a line a request is too much."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Score).serve_forever()
