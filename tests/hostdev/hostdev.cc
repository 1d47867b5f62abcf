// A device of PyTorch in host memory, of the type PrivateUse1: operators and collectives run on the
// CPU, over views of the device's memory, and are complete when they return. Streams and events
// only keep a log, from which tests see who waits for whom.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

// The log.

std::mutex log_lock;
std::string log_text;
std::atomic<bool> logs{false};

void Note(const std::string& what, int64_t number, const c10::Stream& stream) {
  if (!logs) return;
  const std::lock_guard<std::mutex> guard(log_lock);
  log_text += what + " " + std::to_string(number) + " " + std::to_string(stream.id()) + "\n";
}

// Streams and events.

thread_local int64_t current_stream = 0;
std::atomic<int64_t> last_stream{0}, last_event{0};

c10::Stream Numbered(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
int64_t Number(void* event) { return reinterpret_cast<int64_t>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return Numbered(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return Numbered(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return Numbered(++last_stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return Numbered(++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return Numbered(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    Note("synchronize_stream", 0, stream);
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Note("synchronize_device", 0, Numbered(current_stream));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(++last_event);
    Note("record", Number(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    Note("wait", Number(event), stream);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    Note("synchronize_event", Number(event), Numbered(current_stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Note("record_stream", reinterpret_cast<int64_t>(data.get()), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory.

// As from a real device: aligned, and full of what was there before.
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* const data = size ? std::aligned_alloc(512, (size + 511) / 512 * 512) : nullptr;
    TORCH_CHECK(data || !size, "hostdev: out of memory");
    if (size) std::memset(data, 0xA5, size);
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

// Remembers its addresses, because PyTorch asks whether memory is pinned.
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* const data = std::malloc(size ? size : 1);
    TORCH_CHECK(data, "hostdev: out of memory");
    const std::lock_guard<std::mutex> guard(Lock());
    Addresses().insert(data);
    return {data, data, &Free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  static bool Has(const void* data) {
    const std::lock_guard<std::mutex> guard(Lock());
    return Addresses().count(data) != 0;
  }

 private:
  static std::mutex& Lock() {
    static std::mutex lock;
    return lock;
  }
  static std::set<const void*>& Addresses() {
    static auto* const addresses = new std::set<const void*>;
    return *addresses;
  }
  static void Free(void* data) {
    const std::lock_guard<std::mutex> guard(Lock());
    Addresses().erase(data);
    std::free(data);
  }
};
PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(kType, &pinned_memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::Has(data); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DataPtr data = memory.allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Operators.

// The memory of a storage for one of another device, which keeps the first one.
c10::DataPtr Shared(const c10::Storage& storage, c10::Device device) {
  const auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  return {storage.mutable_data(), new c10::Storage(storage), release, device};
}

// A tensor with the layout of another one, in a storage of a device; of a view, base is its base.
at::Tensor Over(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key,
                const at::Tensor& base = {}) {
  at::Tensor made =
      base.defined()  // In inference mode, the view of another tensor is no inference tensor.
          ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage),
                                                     base.key_set(), like.dtype())
          : at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                     c10::DispatchKeySet(key), like.dtype());
  auto* const impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  return made;
}

// The views in host memory of the tensors of one call.
class Views {
 public:
  // All tensors of the operator have to be on the device, if there is one; numbers may be
  // elsewhere.
  explicit Views(const c10::FunctionSchema* op = nullptr) : op_(op) {}

  c10::IValue ToHost(const c10::IValue& value) {
    if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
    if (value.isStorage()) return Host(value.toStorage());
    return Each(value, [this](const at::Tensor& one) { return Host(one); });
  }

  c10::IValue ToDevice(const c10::IValue& value) {
    return Each(value, [this](const at::Tensor& one) { return Device(one); });
  }

  // Operators may have given tensors another size, another storage, or their storages more memory.
  void TakeOver() {
    for (const auto& [there, here] : storages_) {
      if (here.data() != there.data()) {
        there.set_data_ptr_noswap(Shared(here, kDevice));
        there.set_nbytes(here.nbytes());
      }
    }
    for (const auto& [there, here] : tensors_) {
      auto* const impl = there.unsafeGetTensorImpl();
      const c10::Storage storage = Device(here.storage());
      if (!storage.is_alias_of(there.storage())) impl->set_storage_keep_dtype(storage);
      if (here.sizes() != there.sizes() || here.strides() != there.strides() ||
          here.storage_offset() != there.storage_offset()) {
        impl->set_storage_offset(here.storage_offset());
        impl->set_sizes_and_strides(here.sizes(), here.strides());
      }
    }
  }

 private:
  template <class Move>
  static c10::IValue Each(const c10::IValue& value, const Move& move) {
    if (value.isTensor()) return move(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> moved;
      for (const at::Tensor& one : value.toTensorVector()) moved.push_back(move(one));
      return moved;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> moved;
      for (std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        moved.push_back(one && one->device().type() == kType ? std::optional(move(*one)) : one);
      }
      return moved;
    }
    if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
      c10::impl::GenericList moved(c10::ListType::ofTensors());
      for (const c10::IValue& one : value.toListRef()) moved.push_back(Each(one, move));
      return moved;
    }
    return value;
  }

  c10::Storage Host(const c10::Storage& storage) {
    for (const auto& [there, here] : storages_) {
      if (there.is_alias_of(storage)) return here;
    }
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      Shared(storage, c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, made);
    return made;
  }

  c10::Storage Device(const c10::Storage& storage) {
    for (const auto& [there, here] : storages_) {
      if (here.is_alias_of(storage)) return there;
    }
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), Shared(storage, kDevice),
                      &memory, true);
    storages_.emplace_back(made, storage);
    return made;
  }

  at::Tensor Host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      TORCH_CHECK(!op_ || !tensor.dim(),
                  "Expected all tensors to be on the same device, got hostdev and ",
                  tensor.device(), ": ", op_->name());
      return tensor;
    }
    for (const auto& [there, here] : tensors_) {
      if (there.is_same(tensor)) return here;
    }
    tensors_.emplace_back(tensor, Over(Host(tensor.storage()), tensor, c10::DispatchKey::CPU));
    return tensors_.back().second;
  }

  at::Tensor Device(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
    for (const auto& [there, here] : tensors_) {
      if (here.is_same(tensor)) return there;
    }
    for (const auto& [there, here] : tensors_) {
      if (here.storage().is_alias_of(tensor.storage())) {
        return Over(there.storage(), tensor, c10::DispatchKey::PrivateUse1, there);
      }
    }
    return Over(Device(tensor.storage()), tensor, c10::DispatchKey::PrivateUse1);
  }

  const c10::FunctionSchema* const op_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
};

// Runs an operator on the CPU.
void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Views views(&op.schema());
  const size_t count = op.schema().arguments().size();
  for (auto at = stack->end() - count; at != stack->end(); ++at) *at = views.ToHost(*at);
  Note(op.schema().name(), 0, Numbered(current_stream));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  views.TakeOver();
  const size_t returned = op.schema().returns().size();
  for (auto at = stack->end() - returned; at != stack->end(); ++at) *at = views.ToDevice(*at);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

at::Tensor Empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor EmptyStrided(at::IntArrayRef size, at::IntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool) {
  Views views;
  views.ToHost(to).toTensor().copy_(views.ToHost(from).toTensor());
  Note("aten::copy_", 0, Numbered(current_stream));
  return to;
}

void RecordStream(at::Tensor& tensor, c10::Stream stream) {
  Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &Empty);
  library.impl("empty_strided", &EmptyStrided);
  library.impl("_copy_from", &CopyFrom);
  library.impl("record_stream", &RecordStream);
}

// Collectives.

// Runs a collective of a group by the group's backend for this device, which is one for CPUs.
void Collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (auto at = stack->end() - count; at != stack->end(); ++at) {
    if (!at->isObject() || !at->isCustomClass()) continue;
    const auto group = at->toCustomClass<c10d::ProcessGroup>();
    const auto here = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
    here->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                     group->getBackend(kType));
    *at = here;
    break;
  }
  Fallback(op, stack);
}
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, library) {
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_",
        "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "barrier"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&Collective>());
  }
}

}  // namespace

// Begins or ends the log, and returns what is in it.
extern "C" const char* hostdev_log(bool on) {
  static std::string taken;
  const std::lock_guard<std::mutex> guard(log_lock);
  taken.swap(log_text);
  log_text.clear();
  logs = on;
  return taken.c_str();
}
