"""What the environment says."""

from __future__ import annotations

import os

DATABASE_URL = os.environ["DATABASE_URL"]
#: The key that the provider signs its webhooks with: 32 bytes, in hexadecimal digits.
PAYMENT_SECRET = bytes.fromhex(os.environ["PAYMENT_SECRET"])
#: Where the provider reaches us, and where we reach the provider: a fake one of our own unless something else is said.
SHOP_URL = os.environ.get("SHOP_URL", "http://127.0.0.1:5000")
PROVIDER_URL = os.environ.get("PROVIDER_URL", f"{SHOP_URL}/fake-provider")
