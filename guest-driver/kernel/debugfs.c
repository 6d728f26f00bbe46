// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: counters in debugfs, virtio_ism/<device>/counters.
 */
#include <linux/debugfs.h>
#include <linux/seq_file.h>

#include "vism.h"

static struct dentry *vism_debugfs_root;

static const char * const vism_device_counters[VIRTIO_ISM_STATS] = {
	"dmbs", "dmb_bytes", "attached", "slabs", "slab_bytes", "peers",
	"commands", "commands_refused", "moves", "move_bytes", "moves_refused",
	"signals", "wakes", "signals_coalesced", "sw_events", "sw_events_lost",
};

static const char * const vism_record_names[] = {
	"unknown", "dmb_signal", "slab_wake", "dmb_gone", "peer_down",
	"sw_event", "lost",
};

static_assert(ARRAY_SIZE(vism_record_names) == VIRTIO_ISM_EV_LOST + 1);

/* The device's own counters. */
static void vism_show_device(struct seq_file *file, struct vism *ism)
{
	struct virtio_ism_stats stats;

	if (!vism_has_feature(ism, VIRTIO_ISM_F_STATS) ||
	    vism_command(ism, VIRTIO_ISM_OP_STATS, NULL, 0, &stats, sizeof(stats)))
		return;
	for (int i = 0; i < VIRTIO_ISM_STATS; i++)
		seq_printf(file, "device_%s %llu\n", vism_device_counters[i],
			   le64_to_cpu(stats.counters[i]));
}

static int counters_show(struct seq_file *file, void *data)
{
	struct vism *ism = file->private;
	u64 moves = 0, bytes = 0, errors = 0, full = 0, dropped = 0;

	for (int i = 0; i < VISM_MAX_MOVE_QUEUES; i++) {
		struct vism_move_queue *queue = &ism->moves[i];

		guard(spinlock_irqsave)(&queue->lock);
		moves += queue->moves;
		bytes += queue->bytes;
		errors += queue->errors;
		full += queue->full;
		dropped += queue->dropped;
	}
	seq_printf(file, "gid %pUb\nfabric %04x\nusable %d\n", &ism->gid,
		   ism->limits.chid, vism_usable(ism));
	seq_printf(file, "moves %llu\nmove_bytes %llu\nmoves_refused %llu\n",
		   moves, bytes, errors);
	seq_printf(file, "moves_waited %llu\nmoves_dropped %llu\n", full, dropped);
	seq_printf(file, "stores %llu\nstore_bytes %llu\nkicks %llu\nsignals %llu\n",
		   atomic64_read(&ism->window.stores),
		   atomic64_read(&ism->window.bytes),
		   atomic64_read(&ism->window.kicks),
		   atomic64_read(&ism->window.signals));
	seq_printf(file, "commands %llu\ncommands_refused %llu\n",
		   ism->control.commands, ism->control.refused);
	for (int i = 0; i < ARRAY_SIZE(vism_record_names); i++)
		seq_printf(file, "events_%s %llu\n", vism_record_names[i],
			   ism->events.records[i]);
	vism_show_device(file, ism);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counters);

/**
 * vism_debugfs_add() - show the counters of a device
 * @ism: device
 */
void vism_debugfs_add(struct vism *ism)
{
	ism->debugfs = debugfs_create_dir(dev_name(&ism->vdev->dev),
					  vism_debugfs_root);
	debugfs_create_file("counters", 0400, ism->debugfs, ism, &counters_fops);
}

/**
 * vism_debugfs_del() - show the counters of a device no more
 * @ism: device
 */
void vism_debugfs_del(struct vism *ism)
{
	debugfs_remove(ism->debugfs);
}

/**
 * vism_debugfs_init() - create the directory of the driver
 */
void vism_debugfs_init(void)
{
	vism_debugfs_root = debugfs_create_dir("virtio_ism", NULL);
}

/**
 * vism_debugfs_exit() - remove the directory of the driver
 */
void vism_debugfs_exit(void)
{
	debugfs_remove(vism_debugfs_root);
}
