/* `init launch`: makes namespaces and a root, then serves as process 1. `init serve`: only serves, inside a sandbox that
   something else made. Both read directives from standard input first, so that no argument shows anything. */
#include "sandbox.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct config config;

static uint32_t number(const char *data) {
  uint32_t value;
  memcpy(&value, data, 4);
  return value;
}

static void directive(struct frame *frame) { /* keeps frame->data */
  char *data = frame->data;
  int full = config.n_cgroups == MAX_LISTED || config.n_binds == MAX_LISTED || config.n_limits == MAX_LISTED ||
             config.n_environment == MAX_LISTED || config.n_read_only == MAX_LISTED || config.n_open == MAX_LISTED ||
             config.n_settings == MAX_LISTED;
  if (full) {
    write_error(0, 0, "too many directives of one kind");
    exit(71);
  }
  switch (frame->type) {
    case 'p': config.parent = number(data); break;
    case 'u': config.host_uid = number(data); break;
    case 'd': config.disk_uid = number(data); break;
    case 'i': config.inner_uid = number(data); break;
    case 'n': config.host_network = number(data); break;
    case 'g': config.cgroups[config.n_cgroups++] = data; break;
    case 'm': config.mount_point = data; break;
    case 't': config.tmpfs = data; break;
    case 'l': config.lower = data; break;
    case 'b': config.binds[config.n_binds++] = (struct bind){data, data + strlen(data) + 1}; break;
    case 'o': config.read_only[config.n_read_only++] = (struct bind){data, data + strlen(data) + 1}; break;
    case 'a': config.open[config.n_open++] = data; break;
    case 'k': config.settings[config.n_settings++] = (struct bind){data, data + strlen(data) + 1}; break;
    case 'h': config.hostname = data; break;
    case 'e': config.environment[config.n_environment++] = data; break;
    case 'w': config.directory = data; break;
    case 's': config.filter = data, config.filter_size = frame->size; break;
    case 'r': {
      struct limit limit = {number(data), 0};
      memcpy(&limit.value, data + 4, 8);
      config.limits[config.n_limits++] = limit;
      break;
    }
    default: write_error(0, 0, "unknown directive"), exit(71);
  }
}

int main(int argc, char **argv) {
  take_control();
  struct frame frame;
  for (;;) {
    if (read_frame(&frame)) return 0;
    if (frame.type == 'z') break;
    directive(&frame);
  }
  if (!config.directory) config.directory = "/";
  if (argc > 1 && !strcmp(argv[1], "launch"))
    launch();
  else
    close(auxiliary), write_settings("");
  lock_down();
  serve();
}
