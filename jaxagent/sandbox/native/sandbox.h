/* What the parts of the program share. The protocol is described in ../wire.py. */
#ifndef JAXAGENT_SANDBOX_H
#define JAXAGENT_SANDBOX_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAX_FRAME (80u << 20)
#define MAX_LISTED 128 /* directives of one kind */

struct frame {
  uint8_t type;
  uint32_t id, size;
  char *data; /* size bytes and a zero byte more; the caller frees */
};

struct limit {
  uint32_t resource;
  uint64_t value;
};

struct bind {
  const char *source, *target;
};

/* Everything a sandbox is made of, as the host says it before "go". */
struct config {
  uint32_t parent, host_uid, disk_uid, inner_uid, host_network; /* disk_uid: whose the layers' files are */
  const char *cgroups[MAX_LISTED];
  struct bind binds[MAX_LISTED];
  struct bind read_only[MAX_LISTED]; /* both inside the new root */
  const char *open[MAX_LISTED];      /* directories below those that are writable nevertheless */
  struct bind settings[MAX_LISTED];  /* path below /proc/sys, value */
  struct limit limits[MAX_LISTED];
  char *environment[MAX_LISTED + 1];
  int n_cgroups, n_binds, n_read_only, n_open, n_settings, n_limits, n_environment;
  const char *mount_point, *tmpfs, *lower, *hostname, *directory;
  const char *filter;
  uint32_t filter_size;
};

extern struct config config;
extern int control_in, control_out; /* frames come and go here */
extern int auxiliary; /* standard error; to `launch`, a socket to the host for the upper directory */

void take_control(void);                     /* moves descriptors 0 to 2 away from where programs could reach them */
int read_frame(struct frame *frame);         /* 0, or -1 when the host is gone */
void write_frame(uint8_t type, uint32_t id, const void *a, size_t a_size, const void *b, size_t b_size);
void write_error(uint32_t id, int error, const char *text);
void fail(const char *what) __attribute__((noreturn)); /* reports errno to the host and ends the process */

extern char gaps[2048]; /* protections that cannot be had here, for the host to tell; one may be told twice */
void gap(const char *what); /* adds one, and errno */
void write_settings(const char *root);
extern int mercy; /* this process's own oom_score_adj, as a file that stays open */

void launch(void);          /* namespaces and a new root; returns as process 1 of the new sandbox */
void lock_down(void);       /* limits, no_new_privs, no capabilities, seccomp */
void serve(void) __attribute__((noreturn));

struct output { /* of a command; the one that begins it sets keep, and head to its half */
  char *bytes;
  uint64_t keep, head, total;
};

int bounded_read(int fd, struct output *out, uint64_t most); /* reads what is there, but never for ever. 1: more may come;
                                                                0: nobody writes any more */
void answer(uint32_t id, struct output *out, int status, uint8_t flags); /* sends the result and frees the output */

void file_get(struct frame *request);
void file_put(struct frame *request);
void file_list(struct frame *request);
void port_open(struct frame *request);
#endif
