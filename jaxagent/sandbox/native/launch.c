/* From a plain process to process 1 of new user, pid, mount, net, ipc and uts namespaces with a copy-on-write root. */
#include "sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NR_OPEN_TREE = 428, NR_MOVE_MOUNT = 429, NR_MOUNT_SETATTR = 442, MOUNT_IDMAP = 0x100000 }; /* old headers lack them */
#define TERMINALS "24" /* of one sandbox: 2 and 16 old channels are ours; the host has about 3,000 for all */

int mercy = -1;

static void write_file(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, text, strlen(text)) < 0) fail(path);
  close(fd);
}

/* Those of the new namespaces. Older kernels lack some, or have one for the whole host. */
void write_settings(const char *root) {
  for (int i = 0; i < config.n_settings; i++) {
    char path[4352];
    snprintf(path, sizeof path, "%s/proc/sys/%s", root, config.settings[i].source);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    const char *value = config.settings[i].target;
    if (fd < 0 || write(fd, value, strlen(value)) < 0) gap(config.settings[i].source);
    if (fd >= 0) close(fd);
  }
}

static void join(char *to, size_t size, const char *a, const char *b) {
  if ((size_t)snprintf(to, size, "%s%s", a, b) >= size) errno = ENAMETOOLONG, fail(a);
}

/* Dies with the owner: the kernel kills this process when the thread that started it ends, however it ends. */
static void die_with_parent(uint32_t parent) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("PR_SET_PDEATHSIG");
  if (parent && (uint32_t)getppid() != parent) _exit(0);
}

static void send_directory(int fd) {
  struct iovec part = {"u", 1};
  union {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int))];
  } space;
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &space, .msg_controllen = sizeof space};
  struct cmsghdr *header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(auxiliary, &message, MSG_NOSIGNAL) < 0) fail("send the upper directory");
}

static void bind_read_only(const char *source, const char *target) {
  if (mount(source, target, NULL, MS_BIND | MS_REC, NULL)) fail(source);
#ifdef SYS_mount_setattr
  struct {
    uint64_t set, clear, propagation, userns;
  } attributes = {MS_RDONLY | MS_NOSUID, 0, 0, 0}; /* MOUNT_ATTR_RDONLY and _NOSUID have the values of MS_ */
  if (!syscall(SYS_mount_setattr, AT_FDCWD, target, 0x8000 /* AT_RECURSIVE */, &attributes, sizeof attributes)) return;
#endif
  gap("mounts below read-only directories are as they are on the host (mount_setattr)");
  unsigned long locked = 0; /* flags of the host's mount that a user namespace may not clear */
  if (mount(NULL, target, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | locked, NULL) &&
      mount(NULL, target, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL))
    fail(target);
}

static void make_devices(const char *base, const char *root) {
  static const char *const names[] = {"null", "zero", "full", "random", "urandom", "tty"};
  char source[4096], target[4096];
  join(source, sizeof source, base, "/dev");
  join(target, sizeof target, root, "/dev");
  if (mkdir(source, 0755) || mount(source, target, NULL, MS_BIND, NULL)) fail("/dev of the root");
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(source, sizeof source, "/dev/%s", names[i]);
    join(target, sizeof target, root, source);
    int fd = open(target, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd >= 0) close(fd);
    if (mount(source, target, NULL, MS_BIND, NULL)) fail(target);
  }
  join(target, sizeof target, root, "/dev/pts");
  if (mkdir(target, 0755)) fail(target);
  if (mount("devpts", target, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=" TERMINALS))
    fail("devpts");
  static const char *const links[][2] = {{"pts/ptmx", "/dev/ptmx"},
                                         {"/proc/self/fd", "/dev/fd"},
                                         {"/proc/self/fd/0", "/dev/stdin"},
                                         {"/proc/self/fd/1", "/dev/stdout"},
                                         {"/proc/self/fd/2", "/dev/stderr"}};
  for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
    join(target, sizeof target, root, links[i][1]);
    if (symlink(links[i][0], target)) fail(target);
  }
  join(source, sizeof source, base, "/shm");
  join(target, sizeof target, root, "/dev/shm");
  if (mkdir(source, 01777) || chmod(source, 01777) || mkdir(target, 0755)) fail(target);
  if (mount(source, target, NULL, MS_BIND, NULL)) fail(target);
  join(target, sizeof target, root, "/dev"); /* the test's /dev/stdin and /dev/fd are not the agent's to replace */
  if (mount(NULL, target, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL)) fail(target);
}

/* ---- layers that belong to one user id on disk and to another, this sandbox's own, here */
static int layers[MAX_LISTED], n_layers;

/* A user namespace whose map is the change of ids that a mount is to make. A process has to make one. */
static int id_map(uint32_t on_disk, uint32_t here) {
  char path[64], text[64];
  static const char *const maps[] = {"uid_map", "gid_map"};
  int hold[2];
  if (pipe2(hold, O_CLOEXEC)) fail("pipe");
  pid_t child = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, NULL, NULL, NULL, NULL);
  if (child < 0) fail("id-mapped layers: a user namespace");
  if (child == 0) { /* until the other end is closed, by whatever end of the parent */
    close(hold[1]);
    if (read(hold[0], text, 1) < 0) _exit(1);
    _exit(0);
  }
  snprintf(text, sizeof text, "%u %u 1", on_disk, here);
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "/proc/%d/%s", child, maps[i]);
    int map = open(path, O_WRONLY | O_CLOEXEC);
    if (map < 0 || write(map, text, strlen(text)) < 0) fail("id-mapped layers: a map");
    close(map);
  }
  snprintf(path, sizeof path, "/proc/%d/ns/user", child);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("id-mapped layers: the user namespace");
  close(hold[0]), close(hold[1]);
  while (waitpid(child, NULL, 0) < 0 && errno == EINTR) {
  }
  return fd;
}

/* Opens them as mounts that stand nowhere yet, which needs root; make_root puts them into place. */
static void open_layers(void) {
  struct {
    uint64_t set, clear, propagation, userns;
  } attributes = {MOUNT_IDMAP, 0, 0, (uint64_t)id_map(config.disk_uid, config.host_uid)};
  char text[4096];
  join(text, sizeof text, config.lower, "");
  for (char *rest = text, *path; (path = strsep(&rest, ":"));) {
    if (n_layers == MAX_LISTED) errno = E2BIG, fail("layers");
    int fd = (int)syscall(NR_OPEN_TREE, AT_FDCWD, path, 1 | O_CLOEXEC); /* OPEN_TREE_CLONE */
    if (fd < 0 || syscall(NR_MOUNT_SETATTR, fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes))
      fail("id-mapped layers");
    layers[n_layers++] = fd;
  }
  close((int)attributes.userns);
}

/* The text for overlayfs. */
static void place_layers(const char *base, char *lower, size_t size) {
  size_t n = 0;
  for (int i = 0; i < n_layers; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/layer%d", base, i);
    if (mkdir(path, 0755) || syscall(NR_MOVE_MOUNT, layers[i], "", AT_FDCWD, path, 4)) /* MOVE_MOUNT_F_EMPTY_PATH */
      fail("id-mapped layers: into place");
    close(layers[i]);
    n += (size_t)snprintf(lower + n, size - n, "%s%s", i ? ":" : "", path);
    if (n >= size) errno = ENAMETOOLONG, fail("layers");
  }
}

/* A tmpfs of the given size holds everything the sandbox writes; the layers below are never written. */
static void make_root(void) {
  const char *base = config.mount_point;
  char root[4096], path[4096], options[8192], target[4096];
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("private mounts");
  if (mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, config.tmpfs)) fail("tmpfs");
  join(root, sizeof root, base, "/root");
  join(target, sizeof target, base, "/upper");
  join(path, sizeof path, base, "/work");
  if (mkdir(root, 0755) || mkdir(target, 0755) || mkdir(path, 0755)) fail("directories of the overlay");
  char placed[4096];
  if (n_layers) place_layers(base, placed, sizeof placed);
  const char *lower = n_layers ? placed : config.lower;
  int n = snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s", lower, target, path);
  if ((size_t)n >= sizeof options - 16) errno = ENAMETOOLONG, fail("layers");
  strcpy(options + n, ",userxattr");
  if (mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, options)) fail("overlay");
  int upper = open(target, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (upper < 0) fail(target);
  send_directory(upper);
  close(upper);
  for (int i = 0; i < config.n_binds; i++) {
    join(target, sizeof target, root, config.binds[i].target);
    bind_read_only(config.binds[i].source, target);
  }
  make_devices(base, root);
  join(target, sizeof target, root, "/proc");
  if (mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) fail("proc");
  write_settings(root);
  join(target, sizeof target, root, "/proc/sys");
  bind_read_only(target, target);
  if (chdir(root) || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")) fail("pivot_root");
  /* Only now, since an image's links must lead nowhere but into the image. */
  for (int i = 0; i < config.n_read_only; i++)
    if (!access(config.read_only[i].source, F_OK)) bind_read_only(config.read_only[i].source, config.read_only[i].target);
  for (int i = 0; i < config.n_open; i++) {
    const char *path = config.open[i];
    if (mount(path, path, NULL, MS_BIND, NULL)) {
      if (errno == ENOENT) continue;
      fail(path);
    }
    if (mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV, NULL)) fail(path);
  }
}

static void raise_loopback(void) {
  struct ifreq request = {.ifr_name = "lo"};
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return; /* a kernel without IPv4 */
  request.ifr_flags = IFF_UP;
  if (ioctl(fd, SIOCSIFFLAGS, &request)) fail("loopback");
  close(fd);
}

void launch(void) {
  char text[64];
  die_with_parent(config.parent);
  struct rlimit files; /* the descriptors that all of a user's sockets carry are compared with this process's soft limit */
  if (getrlimit(RLIMIT_NOFILE, &files)) fail("getrlimit");
  files.rlim_cur = files.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &files)) fail("setrlimit");
  for (int i = 0; i < config.n_cgroups; i++) write_file(config.cgroups[i], "0");
  if (config.host_uid && geteuid() == 0) {
    gid_t id = (gid_t)config.host_uid;
    if (config.disk_uid && config.disk_uid != config.host_uid) open_layers();
    if (setgroups(0, NULL) || setresgid(id, id, id) || setresuid(id, id, id)) fail("become the dedicated uid");
    die_with_parent(config.parent); /* a change of uid cleared it */
  }
  if (prctl(PR_SET_DUMPABLE, 1)) fail("PR_SET_DUMPABLE"); /* else the files below belong to root */
  uid_t uid = geteuid(), gid = getegid();
  int network = config.host_network ? 0 : CLONE_NEWNET; /* the host's only while an image is built, where it was asked for */
  if (unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | network | CLONE_NEWIPC | CLONE_NEWUTS))
    fail("new namespaces");
  write_file("/proc/self/setgroups", "deny");
  snprintf(text, sizeof text, "%u %u 1", config.inner_uid, uid);
  write_file("/proc/self/uid_map", text);
  snprintf(text, sizeof text, "%u %u 1", config.inner_uid, gid);
  write_file("/proc/self/gid_map", text);
  if (prctl(PR_SET_DUMPABLE, 0)) fail("not PR_SET_DUMPABLE");
  pid_t child = fork();
  if (child < 0) fail("fork");
  if (child > 0) { /* outside: waits for the sandbox, so that this process ends after all of it has */
    close(control_in), close(control_out), close(auxiliary);
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 70);
  }
  die_with_parent(0);
  if (getppid() != 0) _exit(70); /* the parent lives in another pid namespace, so it shows as 0 */
  if (setsid() < 0) fail("setsid");
  make_root();
  close(auxiliary);
  if (sethostname(config.hostname, strlen(config.hostname))) fail("hostname");
  if (!config.host_network) raise_loopback();
}

static void drop_capabilities(void) {
  for (int cap = 0; cap <= 63; cap++)
    if (prctl(PR_CAPBSET_DROP, cap) && errno == EINVAL) break; /* EPERM: not ours to drop, no_new_privs covers it */
  if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) && errno != EINVAL) fail("ambient capabilities");
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct none[2] = {{0}};
  if (syscall(SYS_capset, &header, none)) fail("capset");
}

void lock_down(void) {
  for (int i = 0; i < config.n_limits; i++) {
    struct rlimit limit, old;
    if (getrlimit((int)config.limits[i].resource, &old)) fail("getrlimit");
    limit.rlim_cur = limit.rlim_max = config.limits[i].value < old.rlim_max ? config.limits[i].value : old.rlim_max;
    if (setrlimit((int)config.limits[i].resource, &limit)) fail("setrlimit");
  }
  umask(022);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
  drop_capabilities();
  /* The file says root's where a process is not dumpable, and only process 1 is here to see that this one is. */
  if (prctl(PR_SET_DUMPABLE, 1)) fail("PR_SET_DUMPABLE");
  if ((mercy = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC)) < 0) gap("programs do not die before process 1");
  if (prctl(PR_SET_DUMPABLE, 0)) fail("not PR_SET_DUMPABLE"); /* nobody inside reads or traces this process */
  if (config.filter_size) {
    struct sock_fprog program = {(unsigned short)(config.filter_size / sizeof(struct sock_filter)),
                                 (struct sock_filter *)config.filter};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) fail("seccomp");
  }
}
