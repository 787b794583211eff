"""What differs between versions of the libraries that `conversion/` uses, chosen by what exists."""

from huggingface_hub.errors import HfHubHTTPError


# Its first base is the error of the HTTP library behind the Hub's: httpx with huggingface_hub 1.x, httpx2 with 2.x. The
# second is OSError. RuntimeError is what an upload that failed for good is wrapped in.
HUB_ERRORS = (*HfHubHTTPError.__bases__, RuntimeError)
