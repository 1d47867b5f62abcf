// The machine as a device of TensorFlow, of the type GPU: its placer, its memory types and its
// copies treat it as they treat a real one.
#include <string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"
#include "tensorflow/core/common_runtime/device_factory.h"
#include "tensorflow/core/common_runtime/local_device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/public/session_options.h"
#include "xla/stream_executor/stream.h"

namespace emulated_gpu {
namespace {

using namespace tensorflow;  // NOLINT

namespace se = stream_executor;

constexpr int64_t kMemory = int64_t{1} << 30;

class MachineAllocator : public Allocator {
 public:
  std::string Name() override { return "emulated GPU"; }
  void* AllocateRaw(size_t, size_t bytes) override { return Machine::Get().Allocate(bytes); }
  void DeallocateRaw(void* memory) override { Machine::Get().Free(memory); }
  AllocatorMemoryType GetMemoryType() const override { return AllocatorMemoryType::kDevice; }
};

// As much of a stream as operations use.
class MachineStream : public se::Stream {
 public:
  PlatformSpecificHandle platform_specific_handle() const override { return {&Machine::Get()}; }
  bool ok() const override { return true; }
  absl::Status Memcpy(void* to, const se::DeviceAddressBase& from, uint64_t size) override {
    return Move(to, from.opaque(), size);
  }
  absl::Status Memcpy(se::DeviceAddressBase* to, const void* from, uint64_t size) override {
    return Move(to->opaque(), from, size);
  }
  absl::Status Memcpy(se::DeviceAddressBase* to, const se::DeviceAddressBase& from,
                      uint64_t size) override {
    return Move(to->opaque(), from.opaque(), size);
  }
  absl::Status MemZero(se::DeviceAddressBase* location, uint64_t size) override {
    Machine::Get().Put([to = location->opaque(), size] { memset(to, 0, size); });
    return absl::OkStatus();
  }
  absl::Status BlockHostUntilDone() override {
    Machine::Get().Wait();
    return absl::OkStatus();
  }

  absl::StatusOr<Stream*> GetOrCreateSubStream() override { return Missing(); }
  void ReturnSubStream(Stream*) override {}
  absl::Status WaitFor(Stream*) override { return Missing(); }
  absl::Status WaitFor(se::Event*) override { return Missing(); }
  absl::Status RecordEvent(se::Event*) override { return Missing(); }
  absl::Status DoHostCallbackWithStatus(absl::AnyInvocable<absl::Status() &&>) override {
    return Missing();
  }
  se::StreamExecutor* parent() const override { return nullptr; }
  se::CudaComputeCapability GetCudaComputeCapability() const override { return {}; }
  se::RocmComputeCapability GetRocmComputeCapability() const override {
    return se::RocmComputeCapability();
  }
  se::OneAPIComputeCapability GetOneAPIComputeCapability() const override {
    return se::OneAPIComputeCapability();
  }
  std::variant<se::StreamPriority, int> priority() const override { return 0; }
  const std::string& GetName() const override { return name_; }
  void SetName(std::string name) override { name_ = std::move(name); }

 private:
  static absl::Status Move(void* to, const void* from, uint64_t size) {
    Machine::Get().Put([=] { memcpy(to, from, size); });
    return absl::OkStatus();
  }
  static absl::Status Missing() { return errors::Unimplemented("not emulated"); }

  std::string name_ = "emulated";
};

class MachineContext : public DeviceContext {
 public:
  explicit MachineContext(se::Stream* stream) : stream_(stream) {}

  se::Stream* stream() const override { return stream_; }
  void CopyCPUTensorToDevice(const Tensor* from, Device*, Tensor* to, StatusCallback done,
                             bool) const override {
    Move(*from, to->data(), std::move(done));
  }
  void CopyDeviceTensorToCPU(const Tensor* from, absl::string_view, Device*, Tensor* to,
                             StatusCallback done) override {
    Move(*from, to->data(), std::move(done));
  }
  void CopyTensorInSameDevice(const Tensor* from, Device*, Tensor* to,
                              StatusCallback done) const override {
    Move(*from, to->data(), std::move(done));
  }

 private:
  // Keeps what is copied until it has been; done is called by a thread that may use the machine and
  // wait for it.
  static void Move(const Tensor& from, void* to, StatusCallback done) {
    Machine::Get().Put([from, to, done = std::move(done)] {
      if (const size_t size = from.TotalBytes()) memcpy(to, from.data(), size);
      Env::Default()->SchedClosure([done] { done(absl::OkStatus()); });
    });
  }

  se::Stream* const stream_;
};

class MachineDevice : public LocalDevice {
 public:
  MachineDevice(const SessionOptions& options, const std::string& name)
      : LocalDevice(options, BuildDeviceAttributes(name, DeviceType(DEVICE_GPU), Bytes(kMemory),
                                                   DeviceLocality(), "emulated")),
        context_(new MachineContext(&stream_)) {
    info_.stream = &stream_;
    info_.default_context = context_.get();
    info_.gpu_id = 0;
    set_tensorflow_accelerator_device_info(&info_);
  }

  Allocator* GetAllocator(AllocatorAttributes attributes) override {
    return attributes.on_host() ? cpu_allocator() : &allocator_;
  }

  absl::Status MakeTensorFromProto(const TensorProto& proto, const AllocatorAttributes attributes,
                                   Tensor* tensor) override {
    Tensor parsed(proto.dtype());
    if (!parsed.FromProto(cpu_allocator(), proto)) {
      return errors::InvalidArgument("expected a tensor, got another message");
    }
    // Variants, such as empty lists, are the host's everywhere.
    if (attributes.on_host() || parsed.dtype() == DT_VARIANT) {
      *tensor = parsed;
      return absl::OkStatus();
    }
    Tensor copy(&allocator_, parsed.dtype(), parsed.shape());
    if (copy.TotalBytes()) {
      Machine::Get().Put([copy, parsed] {
        memcpy(const_cast<char*>(copy.tensor_data().data()), parsed.data(), parsed.TotalBytes());
      });
    }
    *tensor = copy;
    return absl::OkStatus();
  }

  absl::Status Sync() override { return stream_.BlockHostUntilDone(); }

  absl::Status TryGetDeviceContext(DeviceContext** context) override {
    context_->Ref();
    *context = context_.get();
    return absl::OkStatus();
  }

 private:
  MachineAllocator allocator_;
  MachineStream stream_;
  core::RefCountPtr<MachineContext> context_;
  AcceleratorDeviceInfo info_;
};

class MachineFactory : public DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override {
    devices->push_back("/physical_device:GPU:0");
    return absl::OkStatus();
  }
  absl::Status CreateDevices(const SessionOptions& options, const std::string& prefix,
                             std::vector<std::unique_ptr<Device>>* devices) override {
    devices->push_back(std::make_unique<MachineDevice>(options, prefix + "/device:GPU:0"));
    return absl::OkStatus();
  }
};

// The priority that TensorFlow gives a GPU: what can run there does.
REGISTER_LOCAL_DEVICE_FACTORY(DEVICE_GPU, MachineFactory, 210);

}  // namespace
}  // namespace emulated_gpu
