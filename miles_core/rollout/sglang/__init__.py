"""The sglang-diffusion engine (sglang 0.5.23): its server, requests, answers and weight pushes."""
