/* What is kept of a command's output: the first half of the allowed bytes and the last half. */
#include "sandbox.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void take(struct output *out, const char *data, size_t n) {
  for (size_t i = 0; i < n;) {
    uint64_t tail = out->keep - out->head, at, run;
    if (out->total < out->head)
      at = out->total, run = out->head - at;
    else if (tail == 0)
      at = 0, run = n - i;
    else
      at = out->head + (out->total - out->head) % tail, run = out->keep - at;
    if (run > n - i) run = n - i;
    if (out->keep && !(out->total >= out->head && tail == 0)) memcpy(out->bytes + at, data + i, run);
    out->total += run, i += run;
  }
}

void answer(uint32_t id, struct output *out, int status, uint8_t flags) {
  char header[13], *ordered = NULL;
  int32_t number = status;
  memcpy(header, &number, 4), header[4] = (char)flags, memcpy(header + 5, &out->total, 8);
  uint64_t size = out->total < out->keep ? out->total : out->keep;
  if (out->total > out->keep && out->keep > out->head) { /* unroll the ring */
    uint64_t tail = out->keep - out->head, start = (out->total - out->head) % tail;
    if (!(ordered = malloc(size))) fail("memory");
    memcpy(ordered, out->bytes, out->head);
    memcpy(ordered + out->head, out->bytes + out->head + start, tail - start);
    memcpy(ordered + out->head + tail - start, out->bytes + out->head, start);
  }
  write_frame('D', id, header, sizeof header, ordered ? ordered : out->bytes, size);
  free(ordered), free(out->bytes);
}

int bounded_read(int fd, struct output *out, uint64_t most) {
  static char data[1 << 16];
  uint64_t start = out->total;
  while (out->total - start < most) {
    ssize_t n = read(fd, data, sizeof data);
    if (n > 0)
      take(out, data, (size_t)n);
    else if (!(n < 0 && errno == EINTR))
      return n < 0 && errno == EAGAIN;
  }
  return 1;
}
