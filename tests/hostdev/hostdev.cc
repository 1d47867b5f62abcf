// A device of PyTorch in host memory, of the type PrivateUse1: operators and collectives run on the
// CPU, over views of the device's memory, and operators are complete when they return. Streams and
// events only keep a log, from which tests see who waits for whom, and who uses what memory.
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
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

// The log.

std::mutex log_lock;
std::string log_text;
std::atomic<bool> logs{false};

std::string Line(const std::string& what, int64_t number, const c10::Stream& stream) {
  return what + " " + std::to_string(number) + " " + std::to_string(stream.id()) + "\n";
}

void Append(const std::string& lines) {
  const std::lock_guard<std::mutex> guard(log_lock);
  log_text += lines;
}

void Note(const std::string& what, int64_t number, const c10::Stream& stream) {
  if (logs) Append(Line(what, number, stream));
}

// Streams and events.

thread_local int64_t current_stream = 0;
std::atomic<int64_t> last_stream{0}, last_event{0};

c10::Stream Numbered(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
c10::Stream Current() { return Numbered(current_stream); }
int64_t Number(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return Current(); }
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
    Note("synchronize_device", 0, Current());
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
    Note("synchronize_event", Number(event), Current());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Note("record_stream", Number(data.get()), stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory.

// Memory like a real device's: aligned, and full of what was there before.
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* const data = size ? std::aligned_alloc(512, (size + 511) / 512 * 512) : nullptr;
    TORCH_CHECK(data || !size, "hostdev: out of memory");
    if (size) std::memset(data, 0xA5, size);
    Note("allocate", Number(data), Current());
    return {data, data, &Free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  static void Free(void* data) {
    Note("free", Number(data), Current());
    std::free(data);
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

// The memory of a storage on the device for one on the host, which keeps the first one.
c10::DataPtr OnHost(const c10::Storage& storage) {
  const auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  return {storage.mutable_data(), new c10::Storage(storage), release, c10::Device(c10::kCPU)};
}

// The same the other way around: memory that an operator has made becomes the device's.
c10::DataPtr OnDevice(const c10::Storage& storage) {
  const auto release = [](void* kept) {
    auto* const made = static_cast<c10::Storage*>(kept);
    Note("free", Number(made->data()), Current());
    delete made;
  };
  Note("allocate", Number(storage.data()), Current());
  return {storage.mutable_data(), new c10::Storage(storage), release, kDevice};
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
        there.set_data_ptr_noswap(OnDevice(here));
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
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), OnHost(storage),
                      c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, made);
    return made;
  }

  c10::Storage Device(const c10::Storage& storage) {
    for (const auto& [there, here] : storages_) {
      if (here.is_alias_of(storage)) return there;
    }
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), OnDevice(storage), &memory,
                      true);
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

// The tensors on the device that a call reads and writes.
class Uses {
 public:
  void Read(const c10::IValue& value) { Find(value, reads_); }
  void Write(const c10::IValue& value) { Find(value, writes_); }

  const std::vector<at::Tensor>& Written() const { return writes_; }
  std::vector<at::Tensor> All() const {
    std::vector<at::Tensor> all = reads_;
    all.insert(all.end(), writes_.begin(), writes_.end());
    return all;
  }

  // A line for the call, and one for each tensor's memory.
  void Log(const std::string& what, const c10::Stream& stream) const {
    if (!logs) return;
    std::string lines = Line(what, 0, stream);
    for (const at::Tensor& one : reads_) lines += Line("reads", Address(one), stream);
    for (const at::Tensor& one : writes_) lines += Line("writes", Address(one), stream);
    Append(lines);
  }

 private:
  static int64_t Address(const at::Tensor& tensor) { return Number(tensor.storage().data()); }

  static void Find(const c10::IValue& value, std::vector<at::Tensor>& found) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.device().type() == kType && tensor.numel()) {
        found.push_back(tensor);
      }
    } else if (value.isList()) {
      for (const c10::IValue& one : value.toListRef()) Find(one, found);
    }
  }

  std::vector<at::Tensor> reads_, writes_;
};

c10::ArrayRef<c10::IValue> Last(const torch::jit::Stack& stack, size_t count) {
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count);
}

// Runs an operator on the CPU.
void Run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Views views(&op.schema());
  const size_t count = op.schema().arguments().size();
  for (auto at = stack->end() - count; at != stack->end(); ++at) *at = views.ToHost(*at);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  views.TakeOver();
  const size_t returned = op.schema().returns().size();
  for (auto at = stack->end() - returned; at != stack->end(); ++at) *at = views.ToDevice(*at);
}

void Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto given = Last(*stack, schema.arguments().size());
  Uses uses;
  bool views = false;
  for (size_t n = 0; n < given.size(); ++n) {
    const auto* const alias = schema.arguments()[n].alias_info();
    views = views || (alias && !alias->isWrite());
    if (alias && alias->isWrite()) uses.Write(given[n]);
  }
  for (size_t n = 0; n < given.size() && !views; ++n) {
    if (!schema.arguments()[n].alias_info()) uses.Read(given[n]);
  }
  Run(op, stack);
  bool tells = false;
  for (const c10::IValue& one : Last(*stack, schema.returns().size())) {
    if (!views) uses.Write(one);
    tells = tells || one.isScalar() || one.isBool();
  }
  uses.Log(schema.name(), Current());
  if (tells) Note("synchronize_stream", 0, Current());  // The host has waited for a number.
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

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Views views;
  views.ToHost(to).toTensor().copy_(views.ToHost(from).toTensor());
  Uses uses;
  uses.Read(from);
  uses.Write(to);
  uses.Log("aten::copy_", Current());
  // The host waits for copies between it and the device, as with CUDA.
  if (from.device() != to.device() && !non_blocking) Note("synchronize_stream", 0, Current());
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

// The stream of a group's collectives, which PyTorch's process group for NCCL also has.
int64_t NetworkOf(const c10d::ProcessGroup* group) {
  static std::mutex lock;
  static auto* const streams = new std::map<const c10d::ProcessGroup*, int64_t>;
  const std::lock_guard<std::mutex> guard(lock);
  return streams->try_emplace(group, ++last_stream).first->second;
}

// A collective as NCCL's: a stream that waits for it waits for the stream of its group. Its tensors
// are kept until one does, and otherwise until it is over.
class Sent final : public c10d::Work {
 public:
  Sent(c10::intrusive_ptr<c10d::Work> work, int64_t network, const Uses& uses)
      : work_(std::move(work)), network_(network), results_(uses.Written()), kept_(uses.All()) {
    Guard().record(&over_, Numbered(network_), 0, c10::EventFlag::PYTORCH_DEFAULT);
  }
  ~Sent() override {
    for (const at::Tensor& one : kept_) {
      Guard().recordDataPtrOnStream(one.storage().data_ptr(), Numbered(network_));
    }
  }
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = work_->wait(timeout);
    Guard().block(over_, Current());
    kept_.clear();
    return done;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                           std::vector<c10::Device>{kDevice});
    work_->getFuture()->addCallback(
        [future, results = results_, network = network_](c10::ivalue::Future& done) {
          const c10::StreamGuard guard(Numbered(network));
          if (done.hasError()) {
            future->setError(done.exception_ptr());
          } else {
            future->markCompleted(results);
          }
        });
    return future;
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const int64_t network_;
  const std::vector<at::Tensor> results_;
  std::vector<at::Tensor> kept_;
  void* over_ = nullptr;
};

// Runs a collective of a group by the group's backend for this device, which is one for CPUs.
void Collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  Uses uses;
  int64_t network = 0;
  for (size_t n = 0; n < arguments.size(); ++n) {
    c10::IValue& given = (*stack)[first + n];
    if (given.isObject() && given.isCustomClass() && !network) {
      const auto group = given.toCustomClass<c10d::ProcessGroup>();
      const auto here = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
      here->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                       group->getBackend(kType));
      network = NetworkOf(group.get());
      given = here;
    } else if (arguments[n].name().rfind("input", 0) == 0 || op.schema().name() == "c10d::send") {
      uses.Read(given);
    } else {
      uses.Write(given);
    }
  }
  void* begun = nullptr;
  Guard().record(&begun, Current(), 0, c10::EventFlag::PYTORCH_DEFAULT);
  Guard().block(begun, Numbered(network));
  uses.Log(op.schema().name(), Numbered(network));
  Run(op, stack);
  c10::IValue& work = stack->back();
  work = c10::intrusive_ptr<c10d::Work>(
      c10::make_intrusive<Sent>(work.toCustomClass<c10d::Work>(), network, uses));
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

// Adds a call of a kernel to the log; addresses of reads come first.
extern "C" void hostdev_use(const char* what, const int64_t* addresses, int reads, int all) {
  if (!logs) return;
  std::string lines = Line(what, 0, Current());
  for (int n = 0; n < all; ++n) {
    lines += Line(n < reads ? "reads" : "writes", addresses[n], Current());
  }
  Append(lines);
}

// Begins or ends the log, and returns what is in it.
extern "C" const char* hostdev_log(bool on) {
  static std::string taken;
  const std::lock_guard<std::mutex> guard(log_lock);
  taken.swap(log_text);
  log_text.clear();
  logs = on;
  return taken.c_str();
}
