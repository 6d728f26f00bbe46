// SPDX-License-Identifier: GPL-2.0
/*
 * Virtio ISM driver: a dibs device whose DMBs lie in guest memory or in the window of the device.
 * Into DMBs of peers the virtio device copies, or this driver stores.
 */
#include <linux/bitmap.h>
#include <linux/log2.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>

#include "vism.h"

/* Fabric ids of emulated devices, for which SMC uses both halves of a GID. */
#define VISM_FIRST_CHID		0xff00
/* The longest delay of a restart, in seconds, as a power of two. */
#define VISM_RESTART_SHIFT	5

static int vism_read_limits(struct vism *ism)
{
	struct virtio_device *vdev = ism->vdev;
	struct virtio_ism_config config;
	u32 revision, max_segs, queues;
	struct vism_limits limits;

	/* Once: the device could say something else next time. */
	virtio_cread_bytes(vdev, 0, &config, sizeof(config));
	revision = le32_to_cpu(config.revision);
	if (revision != VIRTIO_ISM_REVISION) {
		dev_err(&vdev->dev, "unknown revision %u\n", revision);
		return -ENODEV;
	}
	/* Some front ends hide these bits, all of them or none. The configuration repeats them. */
	limits.features = vdev->features & VIRTIO_ISM_F_MASK;
	if (!limits.features)
		limits.features = le32_to_cpu(config.features);
	limits.chid = le16_to_cpu(config.chid);
	limits.max_dmbs = min_t(u32, le32_to_cpu(config.max_dmbs), VISM_MAX_DMBS);
	limits.dmb_min = le32_to_cpu(config.dmb_min);
	limits.dmb_max = le32_to_cpu(config.dmb_max);
	limits.max_move = le32_to_cpu(config.max_move);
	limits.slab_align = le32_to_cpu(config.slab_align);
	limits.window_size = le64_to_cpu(config.window_size);
	max_segs = le16_to_cpu(config.max_segs);
	queues = le16_to_cpu(config.num_move_queues);
	limits.move_queues = min3(queues, VISM_MAX_MOVE_QUEUES, num_possible_cpus());
	if (!(limits.features & BIT(VIRTIO_ISM_F_MOVE))) {
		dev_err(&vdev->dev, "the device does not copy\n");
		return -ENODEV;
	}
	if (!max_segs || !queues || !limits.max_dmbs || !limits.max_move ||
	    !config.max_sg || limits.chid < VISM_FIRST_CHID ||
	    !is_power_of_2(limits.dmb_min) || !is_power_of_2(limits.dmb_max) ||
	    limits.dmb_min > limits.dmb_max ||
	    !is_power_of_2(le32_to_cpu(config.dmb_align)) ||
	    le32_to_cpu(config.dmb_align) > limits.dmb_min) {
		dev_err(&vdev->dev, "configuration makes no sense\n");
		return -EINVAL;
	}
	/* Clients of an earlier session may read it at this moment. */
	ism->limits = limits;
	return 0;
}

static int vism_find_vqs(struct vism *ism)
{
	struct virtqueue_info info[VIRTIO_ISM_VQ_MOVE + VISM_MAX_MOVE_QUEUES] = {
		[VIRTIO_ISM_VQ_CONTROL] = { "control", vism_control_callback },
		[VIRTIO_ISM_VQ_EVENT] = { "event", vism_events_callback },
		[VIRTIO_ISM_VQ_MOVE] = { "move-1" },
		[VIRTIO_ISM_VQ_MOVE + 1] = { "move-2" },
		[VIRTIO_ISM_VQ_MOVE + 2] = { "move-3" },
		[VIRTIO_ISM_VQ_MOVE + 3] = { "move-4" },
	};
	struct virtqueue *vqs[ARRAY_SIZE(info)];
	int rc;

	rc = virtio_find_vqs(ism->vdev, VIRTIO_ISM_VQ_MOVE + ism->limits.move_queues,
			     vqs, info, NULL);
	if (rc)
		return rc;
	ism->control.vq = vqs[VIRTIO_ISM_VQ_CONTROL];
	ism->events.vq = vqs[VIRTIO_ISM_VQ_EVENT];
	for (int i = 0; i < ism->limits.move_queues; i++)
		ism->moves[i].vq = vqs[VIRTIO_ISM_VQ_MOVE + i];
	return 0;
}

/**
 * vism_shut_down() - reset the device, and free what it could access
 * @ism: device
 *
 * Operations of clients fail from here on. DMBs stay until their clients unregister them.
 */
static void vism_shut_down(struct vism *ism)
{
	struct virtqueue *vq;
	unsigned long flags;

	WRITE_ONCE(ism->failed, true);
	virtio_reset_device(ism->vdev);
	/* Who is in a queue now finishes first; who comes later finds the device failed. */
	mutex_lock(&ism->control.mutex);
	spin_lock_irqsave(&ism->control.lock, flags);
	ism->control.vq = NULL;
	spin_unlock_irqrestore(&ism->control.lock, flags);
	spin_lock_irqsave(&ism->events.lock, flags);
	ism->events.vq = NULL;
	spin_unlock_irqrestore(&ism->events.lock, flags);
	for (int i = 0; i < VISM_MAX_MOVE_QUEUES; i++) {
		struct vism_move_queue *queue = &ism->moves[i];

		spin_lock_irqsave(&queue->lock, flags);
		queue->vq = NULL;
		spin_unlock_irqrestore(&queue->lock, flags);
		timer_delete_sync(&queue->reaper);
	}
	cancel_work_sync(&ism->events.again);
	/* Queues do not free the descriptor tables of chains that were not used. */
	virtio_device_for_each_vq(ism->vdev, vq) {
		while (virtqueue_detach_unused_buf(vq))
			;
	}
	ism->vdev->config->del_vqs(ism->vdev);
	for (int i = 0; i < VISM_MAX_MOVE_QUEUES; i++)
		vism_move_exit(&ism->moves[i]);
	/* The device accesses nothing any more. */
	WRITE_ONCE(ism->running, false);
	mutex_unlock(&ism->control.mutex);
	vism_window_close(ism);
	vism_free_orphans(ism);
}

/**
 * vism_bring_up() - begin a session
 * @ism: device, whose features were negotiated
 *
 * Return: 0 or an error number; the device is shut down then.
 */
static int vism_bring_up(struct vism *ism)
{
	int rc;

	rc = vism_read_limits(ism);
	if (rc)
		return rc;
	/* A transport may have fewer queues than the device. */
	while ((rc = vism_find_vqs(ism)) && ism->limits.move_queues > 1)
		ism->limits.move_queues--;
	if (rc)
		return rc;
	for (int i = 0; i < ism->limits.move_queues; i++) {
		rc = vism_move_init(&ism->moves[i]);
		if (rc)
			goto shut_down;
	}
	memset(ism->failed_tokens, 0, sizeof(ism->failed_tokens));
	WRITE_ONCE(ism->running, true);
	/* After all that was made for it: this is what makes the device usable. */
	smp_store_release(&ism->failed, false);
	virtio_device_ready(ism->vdev);
	/* Not before DRIVER_OK: some front ends skip what is there then. */
	vism_events_fill(ism);
	rc = vism_hello(ism);
	if (rc) {
		dev_err(&ism->vdev->dev, "no session: %d\n", rc);
		goto shut_down;
	}
	vism_window_open(ism);
	return 0;
shut_down:
	vism_shut_down(ism);
	return rc;
}

/* Restarts the device after a while, which is the longer the more often it has failed. */
static void vism_restart_later(struct vism *ism)
{
	unsigned int shift = min(ism->failures, VISM_RESTART_SHIFT);

	ism->failures++;
	queue_delayed_work(system_dfl_wq, &ism->restart, HZ << shift);
}

/**
 * vism_fail() - use the device no more, and restart it
 * @ism: device
 * @why: for the log
 *
 * Context: any.
 */
void vism_fail(struct vism *ism, const char *why)
{
	if (xchg(&ism->failed, true))
		return;
	dev_err(&ism->vdev->dev, "device failed: %s\n", why);
	vism_restart_later(ism);
}

/* Gives dibs a new device in place of the old one. */
static void vism_replace(struct work_struct *work)
{
	struct vism *ism = container_of(work, struct vism, replace);
	int rc;

	vism_dibs_del(ism);
	if (!vism_usable(ism))
		return;
	rc = vism_dibs_add(ism);
	if (rc)
		dev_err(&ism->vdev->dev, "cannot add the dibs device: %d\n", rc);
}

static void vism_restart(struct work_struct *work)
{
	struct vism *ism = container_of(work, struct vism, restart.work);
	struct virtio_device *vdev = ism->vdev;
	int rc;

	/* Whoever removes, suspends or resets the device holds this lock, and may wait for us. */
	if (!device_trylock(vdev->dev.parent)) {
		queue_delayed_work(system_dfl_wq, &ism->restart, HZ / 10);
		return;
	}
	/* What an earlier attempt has left in the status is no news to the device. */
	if (!READ_ONCE(ism->running))
		virtio_reset_device(vdev);
	rc = virtio_device_reset_prepare(vdev);
	if (!rc)
		rc = virtio_device_reset_done(vdev);
	device_unlock(vdev->dev.parent);
	if (rc) {
		/* There may be more memory, or a better device, next time. */
		dev_err(&vdev->dev, "cannot restart the device: %d\n", rc);
		vism_restart_later(ism);
	}
}

static int vism_reset_prepare(struct virtio_device *vdev)
{
	struct vism *ism = vdev->priv;

	if (READ_ONCE(ism->running))
		vism_shut_down(ism);
	return 0;
}

static int vism_reset_done(struct virtio_device *vdev)
{
	struct vism *ism = vdev->priv;
	int rc;

	rc = vism_bring_up(ism);
	/* Without a session, too: clients must not wait for a device that is gone. */
	queue_work(system_dfl_wq, &ism->replace);
	return rc;
}

static void vism_config_changed(struct virtio_device *vdev)
{
	struct vism *ism = vdev->priv;

	if (vdev->config->get_status(vdev) & VIRTIO_CONFIG_S_NEEDS_RESET)
		vism_fail(ism, "it needs a reset");
}

static void vism_free(struct vism *ism)
{
	vism_window_exit(ism);
	vism_events_exit(ism);
	vism_control_exit(ism);
	bitmap_free(ism->idx_map);
	kfree(ism);
}

static struct vism *vism_alloc(struct virtio_device *vdev)
{
	struct vism *ism;

	ism = kzalloc_obj(*ism);
	if (!ism)
		return NULL;
	ism->vdev = vdev;
	INIT_DELAYED_WORK(&ism->restart, vism_restart);
	INIT_WORK(&ism->replace, vism_replace);
	mutex_init(&ism->control.mutex);
	spin_lock_init(&ism->control.lock);
	init_completion(&ism->control.done);
	spin_lock_init(&ism->events.lock);
	vism_window_init(ism);
	spin_lock_init(&ism->dmb_lock);
	INIT_LIST_HEAD(&ism->dmbs);
	INIT_LIST_HEAD(&ism->orphans);
	INIT_DELAYED_WORK(&ism->tell, vism_tell_again);
	spin_lock_init(&ism->failed_lock);
	for (int i = 0; i < VISM_MAX_MOVE_QUEUES; i++) {
		ism->moves[i].ism = ism;
		spin_lock_init(&ism->moves[i].lock);
		timer_setup(&ism->moves[i].reaper, vism_reaper, 0);
	}
	ism->idx_map = bitmap_zalloc(VISM_MAX_DMBS, GFP_KERNEL);
	if (!ism->idx_map || vism_control_init(ism) || vism_events_init(ism)) {
		vism_free(ism);
		return NULL;
	}
	return ism;
}

/**
 * struct vism_late - a device that could not be used when the driver came
 * @list: in vism_lates, until its end
 * @vdev: the device, which is held
 * @work: has the driver come again
 * @tries: how often it has
 * @accepted: it has accepted features in the end
 * @noted: the driver has come since the last look began
 *
 * A device whose machine is being migrated, or that has no daemon, accepts no
 * features. That passes, and nobody else has the driver try again.
 */
struct vism_late {
	struct list_head list;
	struct virtio_device *vdev;
	struct delayed_work work;
	unsigned int tries;
	bool accepted;
	bool noted;
};

static LIST_HEAD(vism_lates);
static DEFINE_MUTEX(vism_late_mutex); /* guards the list and what is in it */

static struct vism_late *vism_late_find(struct virtio_device *vdev)
{
	struct vism_late *late;

	list_for_each_entry(late, &vism_lates, list) {
		if (late->vdev == vdev)
			return late;
	}
	return NULL;
}

static void vism_late_free(struct vism_late *late)
{
	put_device(&late->vdev->dev);
	kfree(late);
}

static void vism_late_look(struct work_struct *work)
{
	struct vism_late *late = container_of(work, struct vism_late, work.work);
	struct device *dev = &late->vdev->dev;
	bool again, over;

	mutex_lock(&vism_late_mutex);
	again = !late->accepted;
	late->noted = false;
	mutex_unlock(&vism_late_mutex);
	/* Another driver may have it by now. */
	again = again && device_is_registered(dev) && device_attach(dev) == 0;
	mutex_lock(&vism_late_mutex);
	/* The driver may have come in between. */
	if (again || (late->noted && !late->accepted)) {
		late->tries++;
		queue_delayed_work(system_dfl_wq, &late->work,
				   HZ << min(late->tries, VISM_RESTART_SHIFT));
		mutex_unlock(&vism_late_mutex);
		return;
	}
	over = !list_empty(&late->list);
	list_del_init(&late->list);
	mutex_unlock(&vism_late_mutex);
	/* Otherwise the module goes, and frees it. */
	if (over)
		vism_late_free(late);
}

/* The driver has come to a device that may accept no features. */
static void vism_late_note(struct virtio_device *vdev)
{
	struct vism_late *late;

	mutex_lock(&vism_late_mutex);
	late = vism_late_find(vdev);
	if (late) {
		late->accepted = false;
		late->noted = true;
		goto unlock;
	}
	late = kzalloc_obj(*late);
	if (!late)
		goto unlock;
	get_device(&vdev->dev);
	late->vdev = vdev;
	INIT_DELAYED_WORK(&late->work, vism_late_look);
	list_add(&late->list, &vism_lates);
	queue_delayed_work(system_dfl_wq, &late->work, HZ);
unlock:
	mutex_unlock(&vism_late_mutex);
}

/* The device accepts features. */
static void vism_late_forget(struct virtio_device *vdev)
{
	struct vism_late *late;

	mutex_lock(&vism_late_mutex);
	late = vism_late_find(vdev);
	if (late)
		late->accepted = true;
	mutex_unlock(&vism_late_mutex);
}

static void vism_late_exit(void)
{
	struct vism_late *late;

	mutex_lock(&vism_late_mutex);
	while ((late = list_first_entry_or_null(&vism_lates, struct vism_late, list))) {
		list_del_init(&late->list);
		mutex_unlock(&vism_late_mutex);
		cancel_delayed_work_sync(&late->work);
		vism_late_free(late);
		mutex_lock(&vism_late_mutex);
	}
	mutex_unlock(&vism_late_mutex);
}

static int vism_probe(struct virtio_device *vdev)
{
	struct vism *ism;
	int rc;

	vism_late_forget(vdev);
	ism = vism_alloc(vdev);
	if (!ism)
		return -ENOMEM;
	vdev->priv = ism;
	rc = vism_bring_up(ism);
	if (rc)
		goto free;
	rc = vism_dibs_add(ism);
	if (rc)
		goto free;
	vism_debugfs_add(ism);
	dev_info(&vdev->dev, "GID %pUb on fabric %04x\n", &ism->gid,
		 ism->limits.chid);
	return 0;
free:
	disable_delayed_work_sync(&ism->restart);
	disable_delayed_work_sync(&ism->tell);
	if (READ_ONCE(ism->running))
		vism_shut_down(ism);
	vism_free(ism);
	return rc;
}

static void vism_remove(struct virtio_device *vdev)
{
	struct vism *ism = vdev->priv;

	disable_delayed_work_sync(&ism->restart);
	disable_work_sync(&ism->replace);
	disable_delayed_work_sync(&ism->tell);
	vism_debugfs_del(ism);
	/* Clients end their DMBs by commands, so the device is reset afterwards. */
	vism_dibs_del(ism);
	if (READ_ONCE(ism->running))
		vism_shut_down(ism);
	else /* A restart that has failed is in its status. */
		virtio_reset_device(vdev);
	vism_free(ism);
}

static const struct virtio_device_id vism_ids[] = {
	{ VIRTIO_ID_ISM, VIRTIO_DEV_ANY_ID },
	{ },
};
MODULE_DEVICE_TABLE(virtio, vism_ids);

static const unsigned int vism_features[] = {
	VIRTIO_ISM_F_MOVE,
#if IS_ENABLED(CONFIG_ZONE_DEVICE)
	VIRTIO_ISM_F_WINDOW,
#endif
	VIRTIO_ISM_F_SW_EVENT,
	VIRTIO_ISM_F_STATS,
};

static int vism_validate(struct virtio_device *vdev)
{
	const struct virtio_config_ops *config = vdev->config;
	int rc;

	vism_late_note(vdev);
	/* An attempt that has failed is in its status. */
	if (config->get_status(vdev) & VIRTIO_CONFIG_S_FAILED) {
		virtio_reset_device(vdev);
		config->set_status(vdev, VIRTIO_CONFIG_S_ACKNOWLEDGE |
					 VIRTIO_CONFIG_S_DRIVER);
		rc = config->finalize_features(vdev);
		if (rc)
			return rc;
	}
	/* DMBs are named by guest-physical addresses, which no IOMMU translates. */
	__virtio_clear_bit(vdev, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

static struct virtio_driver vism_driver = {
	.driver.name = KBUILD_MODNAME,
	.id_table = vism_ids,
	.feature_table = vism_features,
	.feature_table_size = ARRAY_SIZE(vism_features),
	.validate = vism_validate,
	.probe = vism_probe,
	.remove = vism_remove,
	.config_changed = vism_config_changed,
	.reset_prepare = vism_reset_prepare,
	.reset_done = vism_reset_done,
#ifdef CONFIG_PM_SLEEP
	.freeze = vism_reset_prepare,
	.restore = vism_reset_done,
#endif
};

static int __init vism_init(void)
{
	int rc;

	vism_debugfs_init();
	rc = register_virtio_driver(&vism_driver);
	if (rc)
		vism_debugfs_exit();
	return rc;
}

static void __exit vism_exit(void)
{
	unregister_virtio_driver(&vism_driver);
	vism_late_exit();
	vism_debugfs_exit();
}

module_init(vism_init);
module_exit(vism_exit);

MODULE_DESCRIPTION("Virtio ISM device as a dibs device");
MODULE_LICENSE("GPL");
