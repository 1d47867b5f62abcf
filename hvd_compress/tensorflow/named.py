"""One compressor class for each codec, which takes the codec's fields as named arguments."""

import hvd_compress.codecs as codecs
from hvd_compress.codecs.named import Named
from hvd_compress.tensorflow.compressor import Compressor


class _Named(Named, Compressor): ...


class OneBit(_Named, codec=codecs.OneBit): ...


class Int8(_Named, codec=codecs.Int8): ...


class Ternary(_Named, codec=codecs.Ternary): ...


class ECQ(_Named, codec=codecs.ECQ): ...


class QSGD(ECQ, codec=codecs.QSGD): ...


class TopK(_Named, codec=codecs.TopK): ...


class FP16(_Named, codec=codecs.FP16): ...


class BF16(_Named, codec=codecs.BF16): ...


class NoCompression(_Named, codec=codecs.NoCompression): ...
