"""Measure what a secure sum costs: bytes against plain float32 uploads, and seconds of clients and server.

    python benchmarks/secure_sum.py [--clients 10 100 1000] [--parameters 60000] [--dropping 0.0 0.1]

All clients and the server are in one process and take the four steps of the protocol with real keys. With `--dropping`,
this share of the clients drops out after it has shared its keys, which costs the server most. Bytes are those of the
tensors in messages, in both directions, and the plain round sends one float32 model each way. A signature of 64 bytes
is included, certificates are not: devices keep them.
"""

import argparse

import numpy as np

from coterie.privacy.secure_sum import rehearsal
from coterie.privacy.secure_sum.client import offer_keys
from coterie.privacy.secure_sum.messages import SIGNATURE_BYTES, SumTerms
from coterie.privacy.secure_sum.rehearsal import SumRehearsal


def signed(terms: SumTerms, client: int):
    return offer_keys(terms, client, sign=lambda text: bytes(SIGNATURE_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--parameters", type=int, default=60_000)
    parser.add_argument("--dropping", type=float, nargs="+", default=[0.0, 0.1])
    a = parser.parse_args()
    rehearsal.offer_keys = signed
    print("| clients | drop out | up, KB each | down, KB each | bytes, plain = 1 | a client, ms | server, s |")
    print("|---|---|---|---|---|---|---|")
    for n in a.clients:
        words = {i: np.full(a.parameters + 2, i, np.uint32) for i in range(n)}
        for share in a.dropping:
            gone = set(range(0, round(share * n)))
            r = SumRehearsal(SumTerms(f"{n}", 3, 0.5), words, dropping={"masked": gone})
            total = r.run()
            assert total[0] == sum(range(n)) - sum(gone) and (total == total[0]).all()
            model = 4 * a.parameters
            up, down = r.up.total() / n, model + r.down.total() / n
            complete = up if not gone else r.up.total() / (n - len(gone))
            ratio = (complete + down) / (2 * model)
            print(
                f"| {n} | {share:.0%} | {complete / 1000:.1f} | {down / 1000:.1f} | {ratio:.3f} | "
                f"{1000 * r.client_seconds / n:.0f} | {r.server_seconds:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
