"""Recipes for Keras on several ranks; docs/keras.md tells what they are for."""

import json
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvd_compress.keras as hvdc


class BackupResiduals(keras.callbacks.Callback):
    """Saves each rank's residuals at the end of an epoch, and restores them after a restart."""

    def __init__(self, folder, epoch):
        super().__init__()
        self.folder, self.epoch = folder, epoch

    def checkpoint(self):
        return tf.train.Checkpoint(compressor=self.model.optimizer.compression)

    def path(self, epoch):
        return f"{self.folder}/residuals-{hvd.rank()}/epoch-{epoch}"

    def on_train_begin(self, logs=None):
        if self.epoch:
            self.checkpoint().read(self.path(self.epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.checkpoint().write(self.path(epoch + 1))
        hvd.allgather_object(
            epoch, name="residuals are saved"
        )  # All are there before the backup is.


def fit_with_backups(model, inputs, labels, *, folder, callbacks=(), **options):
    """``model.fit`` that goes on after the last epoch of which there is a backup."""
    metadata = Path(folder, "backup", "training_metadata.json")
    epoch = json.loads(metadata.read_text())["epoch"] if metadata.exists() else 0
    epoch = hvd.broadcast_object(epoch, root_rank=0)  # What rank 0 has, counts.
    first = [keras.callbacks.BackupAndRestore(f"{folder}/backup")] if hvd.rank() == 0 else []
    callbacks = [BackupResiduals(folder, epoch), *first, hvdc.BroadcastVariables(), *callbacks]
    return model.fit(inputs, labels, initial_epoch=epoch, callbacks=callbacks, **options)


def best_model(folder):
    """Callbacks with which each rank saves the best epoch's model in a directory of its own."""
    path = f"{folder}/rank-{hvd.rank()}/best.keras"
    best = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
    return [hvdc.MetricAverage(), best]  # The ranks' average says which epoch is the best.


def as_many_batches_everywhere(data):
    """As many batches of a ``tf.data.Dataset`` as the rank has that has fewest."""
    return data.take(min(hvd.allgather_object(len(data), name="batches")))


def train_on_batch_or_go_back(model, inputs, labels, limit):
    """Trains on a batch; takes the step back where it moves the weights further than a limit."""
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    weights = model.trainable_variables
    variables = [*weights, *optimizer.variables]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    model.train_on_batch(inputs, labels)
    # The same on every rank, as the weights are: all ranks decide alike.
    moved = [weight - value for weight, value in zip(weights, before, strict=False)]
    if float(tf.linalg.global_norm(moved)) <= limit:
        return True
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    optimizer.compression.drop_step()
    return False
