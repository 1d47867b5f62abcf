// Delays Ethernet frames, loses some of them, and keeps their order: relay NAME MICROSECONDS LOST.
//
// Makes the TAP interface NAME. Frames that the kernel sends there come back MICROSECONDS later.
// Each frame is lost with the probability LOST / 2^32, independently of the others. Writes one line
// when the interface exists, and ends only by a signal or with an error.

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { kLongestFrame = 1 << 16, kBatch = 64 };
static const size_t kMostBytes = (size_t)1 << 30;

// All frames wait equally long, so the order of arrival is also that of departure.
typedef struct Frame {
  struct Frame* next;
  int64_t due;
  size_t size;
  char data[];
} Frame;

static Frame* first;
static Frame** end = &first;
static size_t waiting;

static int Fail(const char* what) {
  fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
  return 1;
}

static int64_t Now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators, scrambled").
static uint32_t Random(uint64_t* state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return (*state * UINT64_C(2685821657736338717)) >> 32;
}

static int Open(const char* name) {
  int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (tap >= 0 && ioctl(tap, TUNSETIFF, &request)) return -1;
  return tap;
}

// Reads the frames that have arrived, at most a batch. Returns false if the interface is broken.
static int Receive(int tap, int64_t delay, uint32_t lost, uint64_t* state) {
  static char buffer[kLongestFrame];
  for (int count = 0; count < kBatch; ++count) {
    ssize_t size = read(tap, buffer, sizeof buffer);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    if (Random(state) < lost) continue;
    Frame* frame = waiting < kMostBytes ? malloc(sizeof(Frame) + size) : NULL;
    if (!frame) {
      errno = ENOMEM;
      return 0;
    }
    frame->next = NULL;
    frame->due = Now() + delay;
    frame->size = size;
    memcpy(frame->data, buffer, size);
    *end = frame;
    end = &frame->next;
    waiting += size;
  }
  return 1;
}

// Sends the frames that are due. Returns the nanoseconds until the next one is, or -1 if none
// waits.
static int64_t Send(int tap) {
  int64_t now = Now();
  while (first) {
    Frame* frame = first;
    if (frame->due > now && frame->due > (now = Now())) return frame->due - now;
    // If the switch's port is down, the frame is lost, as without a cable.
    (void)!write(tap, frame->data, frame->size);
    first = frame->next;
    if (!first) end = &first;
    waiting -= frame->size;
    free(frame);
  }
  return -1;
}

int main(int count, char** arguments) {
  if (count != 4) {
    fputs("usage: relay NAME MICROSECONDS LOST\n", stderr);
    return 2;
  }
  int64_t delay = strtoll(arguments[2], NULL, 10) * 1000;
  uint32_t lost = strtoul(arguments[3], NULL, 10);
  uint64_t state;
  if (getrandom(&state, sizeof state, 0) != sizeof state) return Fail("getrandom");
  state |= 1;  // The generator's state must not be zero.
  int tap = Open(arguments[1]);
  if (tap < 0) return Fail("/dev/net/tun");
  puts("ready");
  fflush(stdout);
  for (;;) {
    if (!Receive(tap, delay, lost, &state)) return Fail(arguments[1]);
    int64_t rest = Send(tap);
    struct timespec timeout = {rest / 1000000000, rest % 1000000000};
    struct pollfd ready = {tap, POLLIN, 0};
    if (ppoll(&ready, 1, rest < 0 ? NULL : &timeout, NULL) < 0 && errno != EINTR) {
      return Fail("ppoll");
    }
  }
}
