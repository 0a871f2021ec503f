/* Frames: u32 size of what follows the header, u8 type, u32 id, data. Little-endian, as every machine we run on. */
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

int control_in = -1, control_out = -1, auxiliary = -1;

void take_control(void) {
  control_in = fcntl(0, F_DUPFD_CLOEXEC, 10);
  control_out = fcntl(1, F_DUPFD_CLOEXEC, 10);
  auxiliary = fcntl(2, F_DUPFD_CLOEXEC, 10);
  int null = open("/dev/null", O_RDWR);
  if (control_in < 0 || control_out < 0 || null < 0) _exit(70);
  for (int fd = 0; fd < 3; fd++) dup2(null, fd);
  if (null > 2) close(null);
}

static int read_all(char *to, size_t size) {
  while (size > 0) {
    ssize_t n = read(control_in, to, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return -1;
    to += n, size -= (size_t)n;
  }
  return 0;
}

int read_frame(struct frame *frame) {
  char header[9];
  if (read_all(header, sizeof header)) return -1;
  memcpy(&frame->size, header, 4);
  frame->type = (uint8_t)header[4];
  memcpy(&frame->id, header + 5, 4);
  if (frame->size > MAX_FRAME) return -1;
  frame->data = malloc((size_t)frame->size + 1);
  if (!frame->data) return -1;
  frame->data[frame->size] = 0;
  return read_all(frame->data, frame->size);
}

void write_frame(uint8_t type, uint32_t id, const void *a, size_t a_size, const void *b, size_t b_size) {
  char header[9];
  uint32_t size = (uint32_t)(a_size + b_size);
  memcpy(header, &size, 4);
  header[4] = (char)type;
  memcpy(header + 5, &id, 4);
  struct iovec parts[3] = {{header, 9}, {(void *)a, a_size}, {(void *)b, b_size}};
  size_t left = 9 + a_size + b_size;
  for (int i = 0; left > 0;) {
    ssize_t n = writev(control_out, parts + i, 3 - i);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(0); /* the host is gone */
    left -= (size_t)n;
    while (i < 3 && (size_t)n >= parts[i].iov_len) n -= (ssize_t)parts[i++].iov_len;
    if (i < 3) parts[i].iov_base = (char *)parts[i].iov_base + n, parts[i].iov_len -= (size_t)n;
  }
}

void write_error(uint32_t id, int error, const char *text) {
  char message[512];
  int n = snprintf(message, sizeof message, "%s%s%s", text, error ? ": " : "", error ? strerror(error) : "");
  int32_t number = error;
  write_frame('E', id, &number, 4, message, (size_t)(n < 511 ? n : 511));
}

char gaps[2048];

void gap(const char *what) {
  size_t n = strlen(gaps);
  snprintf(gaps + n, sizeof gaps - n, "%s%s: %s", n ? "; " : "", what, strerror(errno));
}

void fail(const char *what) {
  write_error(0, errno, what);
  _exit(71);
}
