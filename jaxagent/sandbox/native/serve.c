/* Serves one sandbox from the inside: a persistent shell on a terminal, fresh processes, files. One request at a time.

   The shell's own terminal carries command lines in and exit statuses out. A command's output goes to another
   terminal, the channel, so that printing can neither forge a status nor land in a later command's output: a channel
   that a background process still holds is replaced, and drained slowly so that its writer goes on living. */
#include "sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { TIMED_OUT = 1, SHELL_LOST = 2, FLOODED = 4 };
enum { OLD_CHANNELS = 16, DRAIN_BYTES = 1 << 16, DRAIN_MS = 50, IDLE_MS = 1000 };
enum { MOST_SOCKETS = 1024 }; /* the kernel charges to nobody what connections hold that nobody has accepted */
static const double TERMINAL_S = 5; /* for a terminal, where the host has none left */
static const char NO_TERMINAL[] = "cannot start a shell, since the host is out of terminals (raise kernel.pty.max there)";
static const double GRACE_S = 0.3; /* between ^C, killing the foreground and killing everything */

static int signals = -1;
static pid_t shell, fresh;
static int last_status, shell_status, fresh_status, terminal = -1, channel = -1;
static char channel_path[64];
static int old_channels[OLD_CHANNELS], n_old;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- processes */
static void reap(void) {
  struct signalfd_siginfo info[8];
  while (read(signals, info, sizeof info) > 0) {
  }
  int status;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (pid == shell) shell = 0, shell_status = code;
    if (pid == fresh) fresh = 0, fresh_status = code;
  }
}

static int kill_children(pid_t of) { /* where process 1 is somebody else: the tree below this process */
  char path[64], text[1 << 16];
  snprintf(path, sizeof path, "/proc/%d/task/%d/children", of, of);
  int fd = open(path, O_RDONLY | O_CLOEXEC), killed = 0;
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  for (char *word = strtok(text, " "), *rest; word; word = rest) {
    pid_t pid = (pid_t)atoi(word);
    rest = strtok(NULL, " ");
    if (pid > 1) kill(pid, SIGKILL), killed++;
  }
  return killed; /* their children come to us, the subreaper, and are found in the next round */
}

/* System V objects outlive their processes, and shared memory is charged to nobody who could be killed for it. Only where
   this is process 1, since only there the objects are surely the sandbox's own. */
static void remove_system_v(void) {
  static const char *const lists[] = {"/proc/sysvipc/shm", "/proc/sysvipc/msg", "/proc/sysvipc/sem"};
  for (int kind = 0; kind < 3 && getpid() == 1; kind++) {
    FILE *list = fopen(lists[kind], "re");
    char line[512];
    int id;
    while (list && fgets(line, sizeof line, list))
      if (sscanf(line, "%*d %d", &id) == 1) /* not the first line, which has the columns' names */
        kind == 0 ? shmctl(id, IPC_RMID, NULL) : kind == 1 ? msgctl(id, IPC_RMID, NULL) : semctl(id, 0, IPC_RMID);
    if (list) fclose(list);
  }
}

static int kill_all(void) { /* -1: there are some that do not end */
  int left = 0;
  double end = now() + 5;
  for (;;) {
    if (getpid() == 1)
      kill(-1, SIGKILL); /* every process of this pid namespace except this one */
    else if (!kill_children(getpid())) {
      reap();
      if (!kill_children(getpid())) break;
    }
    reap();
    if (getpid() == 1 && waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD) break;
    if (now() > end && (left = -1)) break;
    usleep(500);
  }
  reap();
  shell = fresh = 0;
  remove_system_v();
  return left;
}

static int kill_everything(void) { /* and nobody writes to the terminals any more */
  int left = kill_all();
  for (int i = 0; i < n_old; i++) close(old_channels[i]);
  n_old = 0;
  if (terminal >= 0) close(terminal);
  if (channel >= 0) close(channel);
  terminal = channel = -1;
  return left;
}

/* One signal to the processes below this one that are spared, or to those that are not; returns how many there are.
   `spared` holds u32 pid, u64 start, as /proc/PID/stat has them: a number may have been given to another since. */
static int signal_some(const char *spared, uint32_t size, int keep, int number) {
  DIR *directory = opendir("/proc");
  int found = 0;
  if (!directory) return 0;
  for (struct dirent *entry; (entry = readdir(directory));) {
    char path[300], text[1024], state;
    uint32_t pid = (uint32_t)strtoul(entry->d_name, NULL, 10);
    unsigned long long start;
    int parent, listed = 0;
    snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
    int fd = pid && (pid_t)pid != getpid() ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) continue;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    char *at = strrchr(text, ')'); /* the name before it is the process's own choice */
    if (!at || sscanf(at + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &state,
                      &parent, &start) != 3)
      continue;
    if (state == 'Z' || (getpid() != 1 && parent != getpid())) continue;
    for (uint32_t i = 0; i + 12 <= size && !listed; i += 12) {
      uint64_t wanted;
      memcpy(&wanted, spared + i + 4, 8);
      listed = !memcmp(&pid, spared + i, 4) && wanted == start;
    }
    if (listed == keep) kill((pid_t)pid, number), found++;
  }
  closedir(directory);
  return found;
}

/* Kills all but those, which are stopped: they show, and do nothing. */
static int kill_others(const char *spared, uint32_t size) {
  int left = 0;
  for (double end = now() + 5; now() < end; usleep(500)) {
    if (getpid() == 1) kill(-1, SIGSTOP); /* so that none makes another meanwhile */
    left = signal_some(spared, size, 0, SIGKILL);
    reap();
    if (!left) break;
  }
  signal_some(spared, size, 1, SIGSTOP);
  remove_system_v();
  shell = fresh = 0;
  if (terminal >= 0) close(terminal);
  terminal = -1;
  return left;
}

static void in_child(void) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  for (int s = 1; s < 32; s++) signal(s, SIG_DFL);
}

/* A child dies for memory before this process does. It has the number from here, since its own file is root's, as this
   process is not dumpable; and a moment in which it were would be one in which others could enter it. */
static pid_t start(void) {
  static char own[16], higher[16];
  if (mercy >= 0 && !*own) {
    if (pread(mercy, own, sizeof own - 1, 0) < 0) fail("oom_score_adj");
    snprintf(higher, sizeof higher, "%d", atoi(own) + 100 < 1000 ? atoi(own) + 100 : 1000);
  }
  if (mercy >= 0 && pwrite(mercy, higher, strlen(higher), 0) < 0) fail("oom_score_adj");
  pid_t pid = fork();
  if (pid < 0 && errno == EAGAIN) kill_all(), pid = fork(); /* a fork bomb holds every process */
  int error = errno;
  if (pid && mercy >= 0 && pwrite(mercy, own, strlen(own), 0) < 0) fail("oom_score_adj");
  errno = error;
  return pid;
}

static void modes(int fd, int signals_on) {
  struct termios t = {0};
  t.c_cflag = CS8 | CREAD | B38400;
  t.c_lflag = signals_on ? ISIG : 0;
  t.c_cc[VMIN] = 1, t.c_cc[VINTR] = 3;
  tcsetattr(fd, TCSANOW, &t);
}

static int open_terminal(char *path, size_t size, int signals_on) {
  const int flags = O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC;
  int fd = open("/dev/pts/ptmx", flags); /* not the link /dev/ptmx, which is the agent's to remove */
  if (fd < 0 && errno == EACCES && !chmod("/dev/pts/ptmx", 0666)) fd = open("/dev/pts/ptmx", flags); /* or to close */
  if (fd < 0) fd = posix_openpt(flags); /* in another's root, which hides it */
  struct winsize window = {.ws_row = 24, .ws_col = 80};
  if (fd < 0) return -1;
  if (unlockpt(fd) || ptsname_r(fd, path, size)) return close(fd), -1;
  modes(fd, signals_on);
  ioctl(fd, TIOCSWINSZ, &window);
  return fd;
}

static const char SOCKETS[] = "/proc/net/sockstat";

static void watch_sockets(void) { /* only where the network is surely the sandbox's own */
  static double last;
  if (getpid() != 1 || config.host_network || now() - last < DRAIN_MS / 1000.0) return;
  last = now();
  char text[64] = "";
  int fd = open(SOCKETS, O_RDONLY | O_CLOEXEC), used = 0;
  if (fd >= 0 && read(fd, text, sizeof text - 1) > 0) sscanf(text, "sockets: used %d", &used);
  if (fd >= 0) close(fd);
  if (used > MOST_SOCKETS) kill_everything();
}

static void drain_old(void) { /* a little of what background processes print, so that they are not blocked for ever */
  static double last;
  static char waste[DRAIN_BYTES];
  if (!n_old || now() - last < DRAIN_MS / 1000.0) return;
  last = now();
  for (int i = 0; i < n_old;) {
    ssize_t n, sum = 0;
    while ((n = read(old_channels[i], waste, sizeof waste)) > 0 && (sum += n) < DRAIN_BYTES) {
    }
    if (n > 0 || (n < 0 && errno == EAGAIN))
      i++;
    else
      close(old_channels[i]), old_channels[i] = old_channels[--n_old];
  }
}

/* ---- the shell */
static int start_shell(void) {
  char path[64];
  if (terminal >= 0) close(terminal);
  terminal = open_terminal(path, sizeof path, 1);
  if (terminal < 0) return -1;
  pid_t pid = start();
  if (pid < 0) return -1;
  if (pid == 0) {
    static char *const bash[] = {"bash", "--norc", "--noprofile", "--noediting", "+H", "+o", "history", "-i", NULL};
    static char *const sh[] = {"sh", "-i", NULL};
    in_child();
    setsid();
    int fd = open(path, O_RDWR);
    if (fd < 0 || ioctl(fd, TIOCSCTTY, 0) || dup2(fd, 0) < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0) _exit(70);
    if (fd > 2) close(fd);
    if (chdir(config.directory) && chdir("/")) _exit(70);
    execve("/bin/bash", bash, config.environment);
    execve("/usr/bin/bash", bash, config.environment);
    execve("/bin/sh", sh, config.environment);
    _exit(127);
  }
  shell = pid;
  return 0;
}

static int own_terminals(void) {
  DIR *directory = opendir("/dev/pts");
  int found = 0;
  if (!directory) return 0;
  for (struct dirent *entry; (entry = readdir(directory));) found += entry->d_name[0] >= '0' && entry->d_name[0] <= '9';
  closedir(directory);
  return found;
}

static int ready(void) { /* a shell, and a terminal for the command's output */
  if (!shell && start_shell()) return -1;
  if (channel < 0) channel = open_terminal(channel_path, sizeof channel_path, 0);
  return channel < 0 ? -1 : 0;
}

static void host_gone(void) {
  if (getpid() != 1) kill_everything();
  _exit(0); /* process 1 of a pid namespace takes everything with it */
}

/* The same whatever the agent's processes hold: every terminal of the sandbox, or every process. Where the host has no
   terminal left that is not their doing, and others give theirs back. */
static int surely_ready(void) {
  for (double end = now() + TERMINAL_S;;) {
    if (!ready()) return 0;
    if (errno != ENOSPC || own_terminals() > OLD_CHANNELS + 2) break;
    if (now() > end) return errno = ENOSPC, -1;
    struct pollfd gone = {control_in, POLLRDHUP, 0};
    if (poll(&gone, 1, 50) > 0) host_gone();
  }
  kill_everything();
  return ready();
}

struct request { /* the fixed part of a request to run something */
  double deadline_s;
  uint64_t keep, flood;
};

static struct output begin(struct frame *frame, struct request *request) {
  memcpy(request, frame->data, sizeof *request);
  struct output out = {NULL, request->keep, request->keep / 2, 0};
  if (request->keep > MAX_FRAME - 64 || !(out.bytes = malloc(out.keep + 1))) fail("memory for output");
  return out;
}

static double first(double a, double b) { return a < b ? a : b; }

/* Data: deadline, keep, flood, nonce (16 characters), the command as ONE quoted shell word. */
static void run_in_shell(struct frame *frame) {
  struct request request;
  struct output out = begin(frame, &request);
  const char *nonce = frame->data + sizeof request, *word = nonce + 17;
  uint8_t flags = 0;
  int status = -1;
  if (surely_ready()) goto lost;
  double end = now() + request.deadline_s;
  modes(terminal, 1);
  char *line, *probe, recent[256], marker[32];
  size_t n_recent = 0, sent = 0;
  int n_probe = asprintf(&probe, "\nprintf '\\n%%s:%%s\\n' %s \"$?\"\n", nonce);
  char restore[32] = ""; /* $? of the last command, as a person at a terminal would find it */
  if (last_status) snprintf(restore, sizeof restore, "(exit %d); ", last_status);
  int n_line = asprintf(&line, "%seval %s </dev/null >%s 2>&1;%s", restore, word, channel_path, probe + 1);
  if (n_line < 0 || n_probe < 0) fail("memory");
  size_t to_send = (size_t)n_line, n_marker = (size_t)snprintf(marker, sizeof marker, "\n%s:", nonce);
  const char *sending = line;
  int stage = 0, lost = 0;
  double next = end, pause = 0.002, listen_at = 0;
  while (status < 0) {
    drain_old();
    watch_sockets();
    double t = now(), wake = first(first(next, listen_at > t ? listen_at : next), t + DRAIN_MS / 1000.0);
    struct pollfd fds[4] = {{control_in, POLLRDHUP, 0},
                            {signals, POLLIN, 0},
                            {terminal, (short)(POLLIN | (sent < to_send ? POLLOUT : 0)), 0},
                            {t >= listen_at ? channel : -1, POLLIN, 0}};
    struct timespec wait = {(time_t)(wake > t ? wake - t : 0), 0};
    wait.tv_nsec = (long)((wake > t ? wake - t - (double)wait.tv_sec : 0) * 1e9);
    if (ppoll(fds, 4, &wait, NULL) < 0 && errno != EINTR) fail("poll");
    if (fds[0].revents) host_gone();
    if (fds[2].revents & POLLOUT) {
      ssize_t n = write(terminal, sending + sent, to_send - sent);
      if (n > 0) sent += (size_t)n;
    }
    if (fds[3].revents) {
      if (bounded_read(channel, &out, 1u << 22))
        pause = 0.002;
      else /* not opened yet, or redirected away for good */
        listen_at = now() + pause, pause = first(2 * pause, 0.05);
    }
    if (fds[2].revents & (POLLIN | POLLHUP)) { /* a status, or noise such as job notices, which is dropped */
      char text[128];
      ssize_t n = read(terminal, text, sizeof text);
      for (ssize_t i = 0; i < n && status < 0; i++) {
        if (n_recent == sizeof recent) memmove(recent, recent + 128, n_recent -= 128);
        recent[n_recent++] = text[i];
        if (text[i] != '\n') continue;
        char *found = memmem(recent, n_recent, marker, n_marker);
        if (found && found + n_marker < recent + n_recent) status = atoi(found + n_marker) & 255;
        recent[0] = '\n', n_recent = 1;
      }
    }
    if (fds[1].revents & POLLIN) reap();
    if (!shell && status < 0) { /* exit, exec of something that ended, or killed */
      status = shell_status, lost = 1;
      break;
    }
    if (status >= 0) break;
    if (!flags && out.total > request.flood) flags |= FLOODED, next = now();
    if (now() < next) continue;
    if (stage == 0 && !(flags & FLOODED)) flags |= TIMED_OUT;
    if (stage == 0 || stage == 1) { /* ^C as a person would type it; then, if that is ignored, the foreground dies */
      pid_t group = 0;
      if (stage == 1 && !ioctl(terminal, TIOCGPGRP, &group) && group > 1) kill(-group, SIGKILL);
      modes(terminal, 1);
      if (write(terminal, "\3", 1) < 0) errno = 0;
      usleep(2000);
      sending = probe, sent = 0, to_send = (size_t)n_probe;
    } else { /* the shell itself does not answer */
      kill_everything();
      status = 137, lost = 1;
      break;
    }
    stage++, next = now() + GRACE_S;
  }
  free(line), free(probe);
  if (channel >= 0 && bounded_read(channel, &out, 1u << 22)) { /* held by a background process: the next command gets another */
    if (n_old == OLD_CHANNELS) {
      close(old_channels[0]);
      memmove(old_channels, old_channels + 1, sizeof(int) * --n_old);
    }
    old_channels[n_old++] = channel, channel = -1;
  }
  if (lost) {
    if (terminal >= 0) close(terminal);
    terminal = -1;
    flags |= SHELL_LOST;
  }
  last_status = lost ? 0 : status;
  answer(frame->id, &out, status, flags);
  return;
lost:
  free(out.bytes);
  write_error(frame->id, errno, errno == ENOSPC ? NO_TERMINAL : "cannot start a shell");
}

/* Data: deadline, keep, flood, u32 arguments, then NUL-ended strings: directory, arguments, environment. */
static void run_fresh(struct frame *frame) {
  struct request request;
  struct output out = begin(frame, &request);
  uint32_t n_arguments;
  memcpy(&n_arguments, frame->data + sizeof request, 4);
  char *at = frame->data + sizeof request + 4, *last = frame->data + frame->size, *directory = at;
  char *strings[4096], **environment;
  uint32_t n = 0;
  for (at += strlen(at) + 1; at < last && n < 4094; at += strlen(at) + 1) {
    if (n == n_arguments) strings[n++] = NULL;
    strings[n++] = at;
  }
  if (n == n_arguments) strings[n++] = NULL;
  strings[n] = NULL, environment = strings + n_arguments + 1;
  int pipes[2];
  if (n_arguments == 0 || n < n_arguments || pipe2(pipes, O_CLOEXEC)) fail("fresh process");
  double end = now() + request.deadline_s;
  pid_t pid = start();
  if (pid < 0) {
    write_error(frame->id, errno, "cannot start a process");
    close(pipes[0]), close(pipes[1]), free(out.bytes);
    return;
  }
  if (pid == 0) {
    in_child();
    setsid();
    dup2(pipes[1], 1), dup2(pipes[1], 2);
    if (chdir(directory)) dprintf(2, "%s: %s\n", directory, strerror(errno)), _exit(126);
    environ = environment;
    execvpe(strings[0], strings, environment);
    dprintf(2, "%s: %s\n", strings[0], strerror(errno));
    _exit(errno == ENOENT ? 127 : 126);
  }
  fresh = pid;
  close(pipes[1]);
  fcntl(pipes[0], F_SETFL, O_NONBLOCK);
  uint8_t flags = 0;
  int open_end = 1;
  while (fresh) {
    drain_old();
    watch_sockets();
    double wait_s = first(end - now(), DRAIN_MS / 1000.0);
    struct pollfd fds[3] = {{control_in, POLLRDHUP, 0}, {signals, POLLIN, 0}, {open_end ? pipes[0] : -1, POLLIN, 0}};
    if (poll(fds, 3, wait_s > 0 ? (int)(wait_s * 1000) + 1 : 0) < 0 && errno != EINTR) fail("poll");
    if (fds[0].revents) host_gone();
    if (fds[2].revents) open_end = bounded_read(pipes[0], &out, 1u << 22);
    if (fds[1].revents & POLLIN) reap();
    if (!flags && fresh && (now() >= end || out.total > request.flood)) {
      flags = now() >= end ? TIMED_OUT : FLOODED;
      kill(-pid, SIGKILL), kill(pid, SIGKILL);
      end = now() + 3600;
    }
  }
  bounded_read(pipes[0], &out, 1u << 22);
  close(pipes[0]);
  answer(frame->id, &out, fresh_status, flags);
}

void serve(void) {
  sigset_t set;
  sigemptyset(&set), sigaddset(&set, SIGCHLD), sigaddset(&set, SIGTERM);
  sigprocmask(SIG_BLOCK, &set, NULL);
  sigdelset(&set, SIGTERM);
  signal(SIGPIPE, SIG_IGN);
  signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals < 0) fail("signalfd");
  if (getpid() != 1 && prctl(PR_SET_CHILD_SUBREAPER, 1)) fail("subreaper");
  if (getpid() == 1 && !config.host_network && access(SOCKETS, R_OK)) gap("the number of sockets is not limited");
  write_frame('H', 0, gaps, strlen(gaps), "", 0);
  for (;;) {
    struct pollfd fds[2] = {{control_in, POLLIN | POLLRDHUP, 0}, {signals, POLLIN, 0}};
    if (poll(fds, 2, n_old ? DRAIN_MS : IDLE_MS) < 0 && errno != EINTR) fail("poll");
    drain_old();
    watch_sockets();
    if (fds[1].revents) reap();
    if (!fds[0].revents) continue;
    struct frame frame;
    if (read_frame(&frame)) host_gone();
    switch (frame.type) {
      case 'R': run_in_shell(&frame); break;
      case 'X': run_fresh(&frame); break;
      case 'G': file_get(&frame); break;
      case 'P': file_put(&frame); break;
      case 'L': file_list(&frame); break;
      case 'O': port_open(&frame); break;
      case 'K':
        if (frame.size ? kill_others(frame.data, frame.size) : kill_everything())
          write_error(frame.id, 0, "processes that were killed do not end");
        else
          write_frame('D', frame.id, "", 0, "", 0);
        break;
      default: write_error(frame.id, 0, "unknown request");
    }
    free(frame.data);
  }
}
