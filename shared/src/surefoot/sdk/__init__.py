"""What runs inside the training process: exact data order, guarded steps, snapshots, resume.

    session = surefoot.sdk.attach(model, optimizer, lr_scheduler=scheduler, dataset=dataset, global_batch_size=32)
    for batch in session:
        loss = session.model(**batch).loss
        session.step(loss)

The only part of `surefoot` that imports torch.
"""

from surefoot.sdk.attach import attach
from surefoot.sdk.constant import Constant
from surefoot.sdk.data.tokens import TokenFile, write_tokens
from surefoot.sdk.session import Session

__all__ = ["Constant", "Session", "TokenFile", "attach", "write_tokens"]
